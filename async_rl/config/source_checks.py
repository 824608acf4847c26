"""Rows that cannot be trained on or evaluated on as the config says. Torch-free; called by `config.checks`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_rl.config.run import RunConfig


def data(config: RunConfig) -> Iterator[str]:
    if config.data.source == "environment" and not config.data.mix and config.environment.name in ("prompt_reward", "verify"):
        yield (
            f"data.source='environment' with environment.name={config.environment.name!r}, which brings no prompts of its own; "
            "set data.source to a .jsonl or .parquet file or a dataset directory"
        )


def mix(config: RunConfig) -> Iterator[str]:
    names = [str(entry.get("source")).rpartition("/")[2].partition(".")[0] for entry in config.data.mix]
    for index, entry in enumerate(config.data.mix):
        key, weight = f"data.mix[{index}]", entry.get("weight", 1.0)
        unknown = [name for name in entry if name not in ("source", "weight", "split", "prompt_column")]
        if not isinstance(entry.get("source"), str) or unknown:
            yield f"{key}={entry!r} needs source, and takes weight, split and prompt_column"
        elif isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            yield f"{key}.weight={weight!r} must be a number above 0, and finite"
        elif names[index] in names[:index]:
            yield f"{key}.source={entry['source']!r}: another source is named {names[index]} too, which names its tasks"
    if config.data.mix and config.data.source != "environment":
        yield f"data.source={config.data.source!r} has no effect with data.mix; list it there, or remove one of them"


def evaluation(config: RunConfig) -> Iterator[str]:
    held_out = config.evaluation
    if held_out.every_steps is None:
        return
    for k in held_out.k:
        if not 1 <= k <= held_out.samples:
            yield f"evaluation.k holds {k}: pass@k needs k from 1 to evaluation.samples={held_out.samples}; raise samples"
    if not held_out.k:
        yield "evaluation.k is empty: nothing would be reported; set it to [1]"
    if not held_out.sources and config.environment.name in ("prompt_reward", "verify", "trl"):
        yield (
            f"evaluation.sources is empty, and environment.name={config.environment.name!r} brings no held-out prompts; name a "
            "file or dataset that is not trained on"
        )
    if held_out.samples > config.rollout.max_running:
        yield (
            f"evaluation.samples={held_out.samples} exceeds rollout.max_running={config.rollout.max_running}: the "
            "completions of a prompt must fit into the engine; lower it or raise rollout.max_running"
        )
    trained = [{"source": config.data.source, **entry} for entry in config.data.mix or [{}]]
    for index, entry in enumerate(held_out.sources):
        key = f"evaluation.sources[{index}]"
        if not isinstance(entry.get("source"), str) or set(entry) - {"source", "split", "prompt_column"}:
            yield f"{key}={entry!r} needs source, and takes split and prompt_column"
        elif any(_same_rows(config, entry, other) for other in trained):
            yield f"{key}.source={entry['source']!r} is trained on; name a source or a split that is not in data"


def _same_rows(config: RunConfig, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """A file is one split, whatever split says."""
    paths, split = (Path(str(one["source"])), Path(str(other["source"]))), config.data.split
    if paths[0].resolve() != paths[1].resolve():
        return False
    return bool(paths[0].suffix) or one.get("split", split) == other.get("split", split)
