"""What a resumed run may change, and what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config import RunConfig, load_config
from async_rl.coordinator.data_record import settle
from async_rl.coordinator.sources import open_source
from async_rl.environments.load import load_environment
from async_rl.errors import ConfigError, DataError
from async_rl.launch.prepare import prepare


def config(tmp_path: Path, *flags: str) -> RunConfig:
    return load_config(None, [f"--run_dir={tmp_path}/run", "--model.path=/m", *flags], {}).config


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--seed=1", r"seed was 0 and cannot become 1 in a resumed run"),
        ("--environment.args.length=5", r"environment\.args was .* and cannot become .*length"),
        ("--data.source=other.jsonl", r"data\.source was .environment. and cannot become .other\.jsonl."),
        ("--data.shuffle=false", r"data\.shuffle was true and cannot become false"),
    ],
)
def test_a_resumed_run_may_not_read_other_prompts(tmp_path: Path, flag: str, message: str) -> None:
    prepare(config(tmp_path), resume=False, overwrite=False)
    before = (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(ConfigError, match=message):
        prepare(config(tmp_path, flag), resume=True, overwrite=False)
    assert (tmp_path / "run" / "config.toml").read_text() == before


def test_a_resumed_run_may_train_further_and_otherwise(tmp_path: Path) -> None:
    prepare(config(tmp_path), resume=False, overwrite=False)
    later = config(tmp_path, "--trainer.max_steps=500", "--rollout.group_size=4", "--staleness.max_lag=9")
    changes = prepare(later, resume=True, overwrite=False).changes
    assert [change.partition(":")[0] for change in sorted(changes)] == [
        "rollout.group_size",
        "staleness.max_lag",
        "trainer.max_steps",
    ]


def test_a_resumed_run_says_which_file_grew_and_refuses_what_changed(tmp_path: Path) -> None:
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "1>"}\n{"prompt": "2>"}\n')
    own = config(tmp_path, f"--data.source={prompts}")
    layout = prepare(own, resume=False, overwrite=False).layout
    settle(open_source(own, "run", load_environment(own.environment)), layout.data_json, cursor=0, known_ids=list)
    prompts.write_text('{"prompt": "1>"}\n{"prompt": "2>"}\n{"prompt": "3>"}\n')
    assert prepare(own, resume=True, overwrite=False).changes == [f"data.source='{prompts}': 1 rows appended, 2 → 3"]
    prompts.write_text('{"prompt": "1>"}\n{"prompt": "9>"}\n{"prompt": "3>"}\n')
    with pytest.raises(DataError, match=r"row 1 \(from 0\) changed since"):
        prepare(own, resume=True, overwrite=False)
