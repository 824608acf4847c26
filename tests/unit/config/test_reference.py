from __future__ import annotations

from pathlib import Path

from async_rl.config.fields import leaf_fields
from async_rl.config.reference import main, reference
from async_rl.config.run import RunConfig

PAGE = Path(__file__).parents[3] / "docs/configuration.md"


def test_committed_page_is_up_to_date():
    assert PAGE.read_text("utf-8") == reference(), "run `make docs`"


def test_page_has_one_row_per_setting():
    rows = [line.split("`")[1] for line in reference().splitlines() if line.startswith("| `")]
    assert rows == sorted(rows, key=rows.index)
    assert set(rows) == set(leaf_fields(RunConfig))
    assert len(rows) == len(leaf_fields(RunConfig))


def test_row_says_type_bounds_default_and_meaning():
    assert (
        "| `algorithm.advantage_eps` | number, > 0, ≤ 1 | `1e-06` | Added to the standard deviation of a group's rewards. |"
        in reference().splitlines()
    )
    assert '| `rollout.kv` | `recompute` or `keep` | `"recompute"` |' in reference()
    assert "| `rollout.max_context` | integer or unset, ≥ 2, ≤ 2^24 | unset |" in reference()
    assert "| `model.path` | path | required |" in reference()
    assert "| `trainer.betas` | list of 2 numbers | `[0.9, 0.999]` |" in reference()


def test_check_tells_a_stale_page_from_a_fresh_one(tmp_path, capsys):
    page = tmp_path / "page.md"
    assert main([str(page)]) == 0
    assert main(["--check", str(page)]) == 0
    page.write_text(page.read_text() + "x")
    assert main(["--check", str(page)]) == 1
    assert "make docs" in capsys.readouterr().err
