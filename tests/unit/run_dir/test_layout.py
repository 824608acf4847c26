"""A run's identity, and what is read back of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.run_dir.layout import create_run, new_run_id, open_run
from protocol.keys import Keys


@pytest.mark.parametrize(
    ("name", "begins_with"),
    [
        ("demo", "demo-"),
        ("7.b_c-d", "7.b_c-d-"),
        ("a run", "a-run-"),
        ("läufe (2)", "l-ufe-2-"),
        ("実験", "run-"),
        ("x" * 200, "x" * 100 + "-"),
        ("{braces}:*", "braces-"),
    ],
)
def test_a_directory_of_any_name_gives_an_id_that_can_name_keys(tmp_path: Path, name: str, begins_with: str) -> None:
    _, identity = create_run(tmp_path / name)
    assert identity.run_id.startswith(begins_with)
    assert len(identity.run_id) == len(begins_with) + 8
    Keys(identity.run_id)  # raises if it cannot
    assert open_run(tmp_path / name)[1] == identity


def test_a_directory_without_a_name_gives_the_id_of_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert new_run_id(Path()).startswith(tmp_path.name[:20])
    assert new_run_id(Path("/")).startswith("run-")


def test_two_runs_of_one_directory_have_two_ids(tmp_path: Path) -> None:
    assert create_run(tmp_path / "run")[1].run_id != create_run(tmp_path / "run", overwrite=True)[1].run_id
