"""The exact oracle: a trainer killed with -9 at random points ends with the weights of one that was never killed.

    python tests/chaos/oracle.py [--kills 200] [--fences 10] [--smoke] [--seed N] [--world-size 1] [--patience 4] [--out DIR]

Three runs over one recorded stream, each on a real server of its own: one with kills, one without, and one whose trainers are
stopped (SIGSTOP) while another starts, and wake (SIGCONT) when that one is ahead. Parameters, moments and ledger must be equal,
bit for bit, and a replay of each log must come out there too. Writes summary.json; exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from oracle_marks import Phase, Place
from oracle_world import MANY_SEGMENTS, TrainerParent, World, ledger_of, same_tensors
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from async_rl.run_dir.layout import write_atomic
from async_rl.testing.recorded_stream import Feeder, RecordedStream
from async_rl.trainer.checkpoint import completed, model_state
from async_rl.trainer.replay import newest_checkpoint, replay

FULL, SMOKE = (200, 10), (15, 2)  # kills, fences
PATIENCE_S = 4.0  # for the moment that a kill is aimed at; then it is killed where it is. A busy machine needs more: --patience
DEADLINE_S = 60.0
SETTLED_S = 3.0  # a checkpoint, and what follows one, are written beside training
POLL_S, LOOK_S = 0.0005, 0.005  # for a mark; for a process
OTHER_RANK_PHASES = (Phase.LOAD, Phase.STEP, Phase.COPY, Phase.WRITE)
FENCED_PHASES = (
    Phase.READ,
    Phase.APPEND,
    Phase.FSYNC,
    Phase.ACKNOWLEDGE,
    Phase.COMPOSE,
    Phase.STEP,
    Phase.WRITE,
    Phase.ANNOUNCE,
)


@dataclass(frozen=True, slots=True)
class Aim:
    """A kill: in which phase, and where in it. phase None: at any time."""

    phase: Phase | None
    place: Place = Place.INSIDE
    rank: int = 0


@dataclass(slots=True)
class Kill:
    """What became of one."""

    aim: Aim
    landed: str
    left: set[str]
    at_s: float
    recovery_s: float | None = None  # until a step that was not trained before; None if the next kill came first


@dataclass(slots=True)
class Torment:
    """A run with kills. Every trainer is killed once, the last one excepted."""

    world: World
    rng: random.Random
    patience_s: float
    kills: list[Kill] = field(default_factory=list)

    async def run(self, aims: Sequence[Aim]) -> int:
        """Do them all, then let the run end. Returns: batches fed."""
        async with self.world.feeding() as feeder:
            at_the_end = [aim for aim in aims if aim.phase is Phase.END]
            for aim in (aim for aim in aims if aim.phase is not Phase.END):
                feeder.limit = max(feeder.limit, self.world.version() + self.rng.randint(3, 6))
                await self._kill_one(aim, feeder)
            feeder.ends = True
            for aim in at_the_end:
                await self._kill_one(aim, feeder)
            await run_to_the_end(self.world)
            return feeder.limit

    async def _kill_one(self, aim: Aim, feeder: Feeder) -> None:
        world, rng = self.world, self.rng
        world.marks.reset()
        if aim.phase is not None and aim.place is not Place.INSIDE:
            count = 1 if aim.phase in {Phase.START, Phase.LOAD, Phase.REPLAY, Phase.END} else rng.randint(1, 3)
            world.marks.set_trap(aim.rank, aim.phase, aim.place, count=count)
        trained = world.version()
        pids = world.start()
        victim = pids[aim.rank]
        end = time.monotonic() + self.patience_s
        when = _Moment(world, feeder, aim, rng)
        looked = 0.0
        while time.monotonic() < end and not when.has_come():
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                self._note_recovery(trained)
                if any(world.exit_code(pid) is not None for pid in pids):
                    break
            await asyncio.sleep(POLL_S if aim.place is Place.INSIDE else LOOK_S)
        codes = [world.exit_code(pid) for pid in pids]
        assert -signal.SIGKILL in codes or not any(codes), f"a trainer ended by itself with {codes}: {world.errors()}"
        assert 0 not in codes or aim.phase is Phase.END, "a trainer came to its end before it was killed"
        world.kill(victim)
        died = time.monotonic()
        await asyncio.sleep(rng.uniform(0.0, 0.05) if len(pids) > 1 else 0.0)
        for pid in pids:
            world.kill(pid)
        self.kills.append(Kill(aim, self._landed(aim), await world.left_half_done(), died))

    def _note_recovery(self, trained: int) -> None:
        if self.kills and self.kills[-1].recovery_s is None and self.world.version() > trained:
            self.kills[-1].recovery_s = time.monotonic() - self.kills[-1].at_s

    def _landed(self, aim: Aim) -> str:
        under_way = self.world.marks.under_way(aim.rank)
        if aim.phase in under_way:
            return str(aim.phase)
        return str(under_way[0]) if under_way else "between phases"


class _Moment:
    """Whether the moment has come that an aim inside a phase, or at any time, waits for. Traps come by themselves."""

    def __init__(self, world: World, feeder: Feeder, aim: Aim, rng: random.Random) -> None:
        self._world, self._feeder, self._aim = world, feeder, aim
        self._published = feeder.published
        self._times = rng.randint(1, 3) if aim.phase not in {Phase.START, Phase.LOAD, Phase.REPLAY, Phase.END} else 1
        self._was_in = False
        self._later = rng.choice((0.0, rng.uniform(0.0, 0.002), rng.uniform(0.0, 0.02)))
        self._at: float | None = time.monotonic() + rng.uniform(0.0, 1.5) if aim.phase is None else None

    def has_come(self) -> bool:
        now = time.monotonic()
        if self._at is None and self._aim.phase is not None and self._aim.place is Place.INSIDE and self._begins():
            self._times -= 1
            self._at = now + self._later if self._times == 0 else None
        return self._at is not None and now >= self._at

    def _begins(self) -> bool:
        """Whether the phase has begun since the last look. A read waits most of the time: what counts is what it is given."""
        if self._aim.phase is Phase.READ:
            before, self._published = self._published, self._feeder.published
            return self._published > before
        assert self._aim.phase is not None
        was_in, self._was_in = self._was_in, self._world.marks.is_in(self._aim.rank, self._aim.phase)
        return self._was_in and not was_in


def plan(kills: int, world_size: int, rng: random.Random) -> list[Aim]:
    """Every phase alike, at its entry, inside and at its exit, in random order; a tenth at any time; a few at the run's end."""
    last = max(1, kills // 20)
    anywhere = max(1, kills // 10)
    phases = [phase for phase in Phase if phase is not Phase.END]
    first = [Aim(phase, place) for phase in phases for place in Place]
    others = [Aim(phase, place, rank) for rank in range(1, world_size) for phase in OTHER_RANK_PHASES for place in Place]
    aims: list[Aim] = []
    while len(aims) < kills - last - anywhere:
        some = [*first, *others]
        rng.shuffle(some)
        aims += some
    aims = aims[: kills - last - anywhere] + [Aim(None, rank=rng.randrange(world_size)) for _ in range(anywhere)]
    rng.shuffle(aims)
    return aims + [Aim(Phase.END, place) for place in islice(_around(Place), last)]


def _around(places: type[Place]) -> Any:
    while True:
        yield from places


async def run_to_the_end(world: World) -> None:
    world.marks.reset()
    pids = world.start()
    version, deadline = world.version(), time.monotonic() + DEADLINE_S
    while any(world.exit_code(pid) is None for pid in pids):
        if world.version() > version:
            version, deadline = world.version(), time.monotonic() + DEADLINE_S
        assert time.monotonic() < deadline, f"the trainer does not come to its end: {world.errors()}"
        await asyncio.sleep(0.02)
    codes = [world.exit_code(pid) for pid in pids]
    assert not any(codes), f"the trainer ended with {codes}: {world.errors()}"


async def run_straight(world: World, batches: int) -> None:
    """Without a kill."""
    async with world.feeding() as feeder:
        feeder.limit, feeder.ends = batches, True
        await run_to_the_end(world)


async def run_with_fences(world: World, rounds: int, rng: random.Random, patience_s: float) -> Counter[str]:
    """Stop a trainer somewhere, let the next one get ahead, wake the old one: it ends, and nothing has changed."""
    ends: Counter[str] = Counter()
    async with world.feeding() as feeder:
        for number in range(rounds):
            world.marks.reset()
            feeder.limit = _even(world.version() + 4)
            (old,) = world.start()
            await _started(world)  # one that has no epoch yet would rightly fence the next
            aim = Aim(FENCED_PHASES[number % len(FENCED_PHASES)])
            moment, end = _Moment(world, feeder, aim, rng), time.monotonic() + patience_s
            while time.monotonic() < end:
                await asyncio.sleep(POLL_S)
                if moment.has_come():
                    break
            os.kill(old, signal.SIGSTOP)
            feeder.limit = max(feeder.limit, _even(world.version() + 4))
            (new,) = world.start()
            before = await _settled(world, feeder.limit)
            os.kill(old, signal.SIGCONT)
            await _end_of(world, old)
            ends[world.last_word(old)] += 1
            after = await world.everything()
            assert after == before, f"a fenced trainer changed something: {before} → {after}"
            assert world.exit_code(new) is None, world.errors()
            world.kill(new)
        feeder.ends = True
        await run_to_the_end(world)
    return ends


async def _started(world: World) -> None:
    """Until the trainer that was just started has raised its epoch."""
    deadline, begun = time.monotonic() + DEADLINE_S, False
    while not begun or world.marks.is_in(0, Phase.START):
        assert time.monotonic() < deadline, f"the trainer does not start: {world.errors()}"
        await asyncio.sleep(POLL_S)
        begun = begun or world.marks.is_in(0, Phase.START)


def _even(batches: int) -> int:
    """Whole batches of two steps: a trainer comes to rest only there."""
    return batches + batches % 2


async def _settled(world: World, version: int) -> str:
    """Everything, once the newest trainer has reached `version` and it has not changed for SETTLED_S."""
    deadline = time.monotonic() + DEADLINE_S
    since, last = time.monotonic(), ""
    while world.version() < version or time.monotonic() - since < SETTLED_S:
        assert time.monotonic() < deadline, f"the new trainer does not come to rest: {world.errors()}"
        await asyncio.sleep(0.1)
        now = await world.everything() if world.version() >= version else ""
        if now != last or not now:
            since, last = time.monotonic(), now
    return last


async def _end_of(world: World, pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while world.exit_code(pid) is None:
        assert time.monotonic() < deadline, "the fenced trainer does not end"
        await asyncio.sleep(0.02)


async def oracle(
    directory: Path, parent: TrainerParent, *, kills: int, fences: int, seed: int, world_size: int, patience_s: float
) -> dict[str, Any]:
    """Run it all and return the summary."""
    rng, stream = random.Random(seed), RecordedStream()
    started = time.monotonic()
    summary: dict[str, Any] = {"seed": seed, "world_size": world_size}
    if fences and world_size == 1:
        with World(directory / "fenced", stream, parent, **MANY_SEGMENTS) as fenced:
            ends = await run_with_fences(fenced, fences, rng, patience_s)
        summary |= {
            "fenced": fences,
            "fenced_ends": dict(ends),
            "fenced_audit_exact": ledger_of(fenced)["exact"],
            "fenced_identical_to_replay": replays(fenced),
        }
    begun = time.monotonic()
    with World(directory / "killed", stream, parent, world_size=world_size, **MANY_SEGMENTS) as killed:
        torment = Torment(killed, rng, patience_s)
        batches = await torment.run(plan(kills, world_size, rng))
    with_kills_s = time.monotonic() - begun
    with World(directory / "straight", stream, parent, world_size=world_size) as straight:
        await run_straight(straight, batches)
    return {
        "kills": len(torment.kills),
        "steps": batches,
        "seconds": round(with_kills_s, 1),
        "seconds_in_all": round(time.monotonic() - started, 1),
        **compare(killed, straight, batches),
        **tables(torment.kills),
        **summary,
    }


def compare(killed: World, straight: World, batches: int) -> dict[str, Any]:
    """Everything that must be equal, and that there was something to get wrong."""
    one, other = newest_checkpoint(killed.checkpoints), newest_checkpoint(straight.checkpoints)
    ledger, expected = ledger_of(killed), ledger_of(straight)
    start, end = load_file(killed.model / "model.safetensors"), model_state(other.path)
    alone = killed.world_size == 1  # a replay has one rank, and the sums of two round otherwise
    return {
        "identical_to_uninterrupted": one.step == other.step == batches and same_tensors(one, other),
        "identical_to_replay": replays(killed) if alone else None,
        "uninterrupted_identical_to_replay": replays(straight) if alone else None,
        "every_tensor_was_trained": all(not torch.equal(start[name], end[name]) for name in start),
        "same_ledger": ledger == expected,
        "every_step_once": ledger["steps"] == list(range(1, batches + 1)),
        "audit_exact": ledger["exact"],
        "lost": ledger["lost"],
        "twice": ledger["twice"],
    }


def replays(world: World) -> bool:
    """Whether a replay comes out at the newest checkpoint: from the oldest one that is left, or from the run's beginning."""
    kept = sorted(int(path.name.removeprefix("step_")) for path in completed(world.checkpoints))
    whole = world.config.checkpoint.log_segment_bytes > 2**20
    return replay(world.config, start=None if whole else kept[0]).is_identical


def tables(kills: Sequence[Kill]) -> dict[str, Any]:
    """Per phase how many kills landed there and how long recovery took; what they left half done."""
    times = [kill.recovery_s for kill in kills if kill.recovery_s is not None]
    left: Counter[str] = Counter(what for kill in kills for what in kill.left)
    phases: dict[str, dict[str, Any]] = {}
    for name in [*map(str, Phase), "between phases"]:
        here = [kill for kill in kills if kill.landed == name]
        known = [kill.recovery_s for kill in here if kill.recovery_s is not None]
        aimed = Counter(str(kill.aim.place) for kill in here if str(kill.aim.phase) == name)
        phases[name] = {
            "kills": len(here),
            **{place.value: aimed[place.value] for place in Place},
            "recovery_p50_s": round(statistics.median(known), 3) if known else None,
            "recovery_max_s": round(max(known), 3) if known else None,
        }
    return {
        "phases": phases,
        "left_half_done": dict(left),
        "recovery_p50_s": round(statistics.median(times), 3) if times else None,
        "recovery_max_s": round(max(times), 3) if times else None,
    }


def problems(summary: dict[str, Any], kills: int, fences: int) -> list[str]:
    """What the runs failed to show."""
    must_hold = [key for key, value in summary.items() if value is False]
    found = [f"{key} is false" for key in must_hold]
    if summary["kills"] != kills or summary["lost"] or summary["twice"]:
        found.append(f"{summary['kills']} kills of {kills}, {summary['lost']} lost, {summary['twice']} trained twice")
    if "fenced" in summary and summary["fenced_ends"] != {"EpochFenced": fences}:
        found.append(f"fenced trainers ended with {summary['fenced_ends']}")
    empty = [name for name, row in summary["phases"].items() if not row["kills"] and name != "between phases"]
    if empty and kills >= FULL[0]:
        found.append(f"no kill landed in: {', '.join(empty)}")
    return found


def print_summary(summary: dict[str, Any], console: Console) -> None:
    columns = ("phase", "kills", "at its entry", "inside", "at its exit", "recovery p50", "max")
    table = Table(*columns, title="where the kills landed", title_justify="left")
    for name, row in summary["phases"].items():
        if row["kills"]:
            times = ("–" if row[key] is None else f"{row[key]:.2f} s" for key in ("recovery_p50_s", "recovery_max_s"))
            table.add_row(name, *(str(row[key]) for key in ("kills", "entry", "inside", "exit")), *times)
    console.print(table)
    console.print({key: value for key, value in summary.items() if key != "phases"})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if anything differs; the runs are kept then."""
    parser = argparse.ArgumentParser(description="Kill the trainer at random points; the weights must not notice.")
    parser.add_argument("--kills", type=int, default=None, help=f"default: {FULL[0]}, with --smoke {SMOKE[0]}")
    parser.add_argument("--fences", type=int, default=None, help=f"default: {FULL[1]}, with --smoke {SMOKE[1]}")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock; it is printed")
    parser.add_argument("--world-size", type=int, default=1, help="ranks of the trainer; one of them is killed")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds that a kill waits for its moment")
    parser.add_argument("--out", type=Path, default=Path("runs/oracle"))
    arguments = parser.parse_args(argv)
    defaults = SMOKE if arguments.smoke else FULL
    kills = defaults[0] if arguments.kills is None else arguments.kills
    fences = defaults[1] if arguments.fences is None else arguments.fences
    seed = int(time.time()) % 2**31 if arguments.seed is None else arguments.seed
    torch.set_num_threads(1)
    console = Console()
    console.print(f"{kills} kills, {fences} fences, seed {seed}", highlight=False)
    directory = Path(tempfile.mkdtemp(prefix="arl-oracle-"))
    chosen = {"kills": kills, "fences": fences, "seed": seed, "world_size": arguments.world_size}
    patience_s: float = arguments.patience
    try:
        with TrainerParent() as parent:
            summary = asyncio.run(oracle(directory, parent, **chosen, patience_s=patience_s))
    except BaseException:
        console.print(f"the runs are kept in {directory}")
        raise
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_atomic(arguments.out / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    print_summary(summary, console)
    found = problems(summary, kills, fences)
    for problem in found:
        console.print(f"PROBLEM: {problem}", style="bold red", markup=False)
    if found:
        console.print(f"the runs are kept in {directory}")
        return 1
    shutil.rmtree(directory)
    console.print("exact: no kill changed a bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
