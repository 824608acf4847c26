"""`async-rl check-rewards FILE`: run a verifier over rows whose right score is known, and show where it disagrees."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.environments.base import Environment, Episode, TurnText
from async_rl.environments.load import close_environment
from async_rl.environments.verifiers.load import VERIFIERS, verify
from async_rl.errors import DataError
from async_rl.reward.score import score_episode, score_group
from protocol.messages import FinishReason, Json, PromptTask, Reward, task_id

INVALID = "invalid"
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """One row and what the verifier said."""

    number: int
    answer: str
    gold: Json
    expected: float | str
    reward: Reward
    seconds: float

    @property
    def agrees(self) -> bool:
        if self.expected == INVALID:
            return not self.reward.is_valid
        return self.reward.value is not None and abs(self.reward.value - float(self.expected)) < 1e-9


def check_rewards(path: Path, verifier: str, args: Mapping[str, Any], *, timeout_s: float = 30.0) -> list[CheckedRow]:
    """Score every row of a JSONL file.

    A row: `answer` (the completion), `gold` (what the verifier compares with; its column is "gold"), `expected` (a number, or
    "invalid"), and further columns that the verifier may read. Raises: DataError, ConfigError.
    """
    rows = _read(path)
    if "gold" not in args and verifier in VERIFIERS and verifier in ("math", "exact"):
        args = {**args, "gold": "gold"}
    environment = verify([{"use": verifier, **args}])
    return asyncio.run(_check(environment, rows, timeout_s))


async def _check(environment: Environment, rows: Sequence[tuple[int, dict[str, Any]]], timeout_s: float) -> list[CheckedRow]:
    slots = asyncio.Semaphore(8)

    async def one(number: int, row: dict[str, Any]) -> CheckedRow:
        async with slots:
            started = time.monotonic()
            episode = _episode(number, row)
            reward = await score_episode(environment, episode, timeout_s)
            (reward,) = await score_group(environment, [episode], [reward], timeout_s)
            return CheckedRow(number, row["answer"], row["gold"], row["expected"], reward, time.monotonic() - started)

    try:
        return list(await asyncio.gather(*(one(number, row) for number, row in rows)))
    finally:
        await close_environment(environment)


def print_checked(rows: Sequence[CheckedRow], console: Console) -> None:
    """Every disagreement, then the counts."""
    wrong = [row for row in rows if not row.agrees]
    if wrong:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("line", "answer", "gold", "expected", "score"):
            table.add_column(name, overflow="fold")
        for row in wrong:
            said = f"{row.reward.value:g}" if row.reward.value is not None else f"invalid ({row.reward.invalid_reason})"
            cells = (str(row.number), _short(row.answer), _short(row.gold), str(row.expected), said)
            table.add_row(*map(Text, cells))
        console.print(table)
    slowest = max((row.seconds for row in rows), default=0.0)
    verdict = f"{len(rows) - len(wrong)} of {len(rows)} rows agree; the slowest took {slowest:.2f} s"
    console.print(verdict, style="red" if wrong else "green", highlight=False)


def _read(path: Path) -> list[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; give a JSONL file with answer, gold and expected in each row")
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not a line of JSON: {error}") from error
        missing = [key for key in ("answer", "gold", "expected") if not isinstance(row, dict) or key not in row]
        if missing:
            raise DataError(f"{path}:{number}: no {' and no '.join(missing)}; each row needs answer, gold and expected")
        if row["expected"] != INVALID and not isinstance(row["expected"], int | float):
            raise DataError(f"{path}:{number}: expected={row['expected']!r} must be a number or {INVALID!r}")
        rows.append((number, row))
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def _episode(number: int, row: dict[str, Any]) -> Episode:
    columns = {key: value for key, value in row.items() if key not in ("expected", "prompt", "answer")}
    prompt = row.get("prompt", "")
    task = PromptTask(
        run_id="check",
        task_id=task_id("check", 0, number, 0),
        source="check",
        data_epoch=0,
        row=number,
        repeat=0,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        columns=columns,
        environment="verify",
        group_size=1,
        seed=number,
        temperature=1.0,
        max_new_tokens=1,
        issued_at_s=0.0,
    )
    return Episode(task, 0, (TurnText(str(row["answer"]), FinishReason.STOP, (0,) * int(row.get("num_tokens", 0))),))


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
