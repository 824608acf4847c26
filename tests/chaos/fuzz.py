"""Throw bad frames at the decoder, and at a real stream; show that nothing crashes, runs, hangs or is lost.

    python tests/chaos/fuzz.py [--smoke] [--seconds 600] [--seed N] [--out runs/fuzz]

1. Decoder: for every frame, `decode` answers with a message or raises CodecError; nothing else. It is quick (no frame takes
   a second of the processor), executes nothing (an audit hook listens for imports, processes, files, compilation), and keeps no
   memory. What it accepts can be encoded again, and reads back as the same bytes.
2. Stream: bad entries between good ones, through a real server into a real intake log. Every good group ends up in the log,
   every bad one in `dead` with a reason, every task has ended.

Writes summary.json with the counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.run_dir.intake_log import IntakeLog, read_log
from async_rl.testing.builders import make_task
from async_rl.testing.fuzz import bad_frame, encode_group
from async_rl.trainer.intake import BatchSettings, Intake
from protocol.codec import decode, encode
from protocol.deliveries import group_of
from protocol.errors import CodecError
from protocol.keys import trainer_consumer
from protocol.messages import task_id
from protocol.redis_streams import RedisStreams
from protocol.streams import Delivery, IssuedTask, Publication, Stream, Streams

SECONDS, SMOKE_SECONDS = 600.0, 8.0
ENTRIES, SMOKE_ENTRIES = 20_000, 400
SLOWEST_S = 1.0
WARM_FRAMES = 20_000
TAKE_S = 120.0
MEMORY_SLACK_KIB = 64 * 1024
WATCHED = (
    "import",
    "exec",
    "compile",
    "open",
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "pickle.find_class",
    "ctypes",
    "socket",
)

_seen: list[str] = []
_is_decoding = False


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    """What the interpreter itself reports; an audit hook cannot be taken away, so it looks at a flag."""
    if _is_decoding and event.startswith(WATCHED):
        _seen.append(f"{event}{arguments[:1]}")


def fuzz_decoder(seconds: float, random_: random.Random) -> dict[str, object]:
    """Frames until the time is up. Raises: AssertionError for a frame that did what none may."""
    global _is_decoding  # noqa: PLW0603 - the hook is one of the interpreter
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    slowest, base_kib, number = 0.0, 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or number < WARM_FRAMES // 10:
        name, frame = bad_frame(number, random_)
        _is_decoding = True
        started = time.thread_time()  # of the processor: a busy machine does not make a frame slow
        try:
            message = decode(frame)
            outcome = "accepted"
        except CodecError as error:
            outcome = "refused"
            reasons[str(error).split(":")[0][:40]] += 1
        finally:
            _is_decoding = False
        slowest = max(slowest, time.thread_time() - started)
        assert not _seen, f"decoding {frame!r} did {_seen}"
        assert slowest < SLOWEST_S, f"decoding {frame[:100]!r}… took {slowest:.1f} s"
        if outcome == "accepted":
            again = encode(message)
            assert encode(decode(again)) == again, f"{frame!r} does not read back as itself"
        outcomes[f"{name}: {outcome}"] += 1
        number += 1
        if number == WARM_FRAMES:
            base_kib = _peak_kib()
    grown_kib = _peak_kib() - base_kib if base_kib else 0
    assert grown_kib < MEMORY_SLACK_KIB, f"memory grew by {grown_kib} KiB over {number} frames"
    accepted = sum(count for name, count in outcomes.items() if name.endswith("accepted"))
    return {
        "frames": number,
        "accepted": accepted,
        "refused": number - accepted,
        "slowest_ms": round(1000 * slowest, 2),
        "memory_grown_kib": grown_kib,
        "kinds_of_refusal": len(reasons),
        "by_mutation": dict(sorted(outcomes.items())),
    }


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def fuzz_stream(entries: int, random_: random.Random, directory: Path) -> dict[str, object]:
    """Bad and good groups through a server into a log. Raises: AssertionError if one is missing on either side."""
    with EmbeddedRedis(directory / "redis", appendfsync="everysec") as server:
        streams = RedisStreams(server.url, "fuzz", lease_s=0.0)
        await streams.open()
        epoch = await streams.raise_epoch(1)
        log = IntakeLog.open(directory / "intake", epoch=epoch)
        settings = BatchSettings(groups_per_step=2, steps_per_batch=1, max_lag=1, stragglers="drop", seed=0)
        intake = Intake(streams, log, settings)
        bad: set[str] = set()
        for first in range(0, entries, 200):
            rows = range(first, min(first + 200, entries))
            bad |= await _publish(streams, rows, random_)
            await take_all(streams, intake, epoch)
            deaths = await streams.newly_dead(epoch)
            await intake.record_dead(list(deaths.items()))
            await streams.finish_dead(epoch, list(deaths))
        dead = await streams.dead_entries(count=entries)
        left = await streams.outstanding()
        await streams.close()
        log.close()
    index = read_log(directory / "intake")
    good = {task_id("test", 0, row, 0) for row in range(entries)} - bad
    assert {entry.task_id for entry in dead} == bad, "the dead are not the bad ones"
    assert all(entry.reason.startswith("unreadable group: ") for entry in dead)
    assert set(index.groups) == good, "the log does not have exactly the good ones"
    assert set(index.dead) == bad
    assert not left
    return {"entries": entries, "good_in_log": len(good), "bad_in_dead": len(bad), "outstanding": len(left)}


async def take_all(streams: Streams, intake: Intake, epoch: int, *, deadline_s: float = TAKE_S) -> None:
    """Empty the stream of groups into the log. As the trainer's loop does, also what was delivered in a reply that got lost (a
    busy machine answers late): no later read brings it. Raises: TimeoutError that says what is left."""
    try:
        async with asyncio.timeout(deadline_s):
            while (await streams.depths())[Stream.GROUPS].length:
                deliveries = await streams.read_groups(epoch, count=50, block_s=0.05)
                await intake.take_in(deliveries or await streams.own_pending(Stream.GROUPS, trainer_consumer(epoch)))
    except TimeoutError as error:
        raise TimeoutError(f"after {deadline_s:g} s the stream of groups still holds {(await streams.depths())}") from error


async def _publish(streams: RedisStreams, rows: range, random_: random.Random) -> set[str]:
    """Issue and publish a group per row, about half of them bad; the ids of the bad ones. A lost answer is asked for again, so
    what a call says of itself counts for nothing: the end of the run says whether all of it happened, once."""
    tasks = [make_task(row=row) for row in rows]
    issued = [IssuedTask(task.task_id, encode(task)) for task in tasks]
    await streams.issue(rows.start, issued, next_cursor=rows.stop)
    leased = await streams.read(Stream.TASKS, "w", count=len(rows), block_s=0) or await streams.own_pending(Stream.TASKS, "w")
    bad: set[str] = set()
    publications: list[Publication] = []
    for row, lease in zip(rows, leased, strict=True):
        frame = encode_group(row, random_) if random_.random() < 0.5 else bad_frame(row, random_)[1]
        publications.append(Publication(Stream.TASKS, lease.entry_id, Stream.GROUPS, frame, lease.task_id))
        try:
            group_of(Delivery(Stream.GROUPS, lease.entry_id, frame, task_id=lease.task_id))
        except CodecError:
            bad.add(str(lease.task_id))
    await streams.publish(publications)
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seconds", type=float, default=None, help=f"of the decoder's part; default {SECONDS:g}")
    parser.add_argument("--entries", type=int, default=None, help=f"of the stream's part; default {ENTRIES}")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock; it is in the summary")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    arguments = parser.parse_args(argv)
    seconds = arguments.seconds or (SMOKE_SECONDS if arguments.smoke else SECONDS)
    entries = arguments.entries or (SMOKE_ENTRIES if arguments.smoke else ENTRIES)
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    sys.addaudithook(_listen)
    random_ = random.Random(seed)
    summary: dict[str, object] = {"seed": seed, "decoder": fuzz_decoder(seconds, random_)}
    with tempfile.TemporaryDirectory(prefix="arl-") as directory:
        summary["stream"] = asyncio.run(fuzz_stream(entries, random_, Path(directory)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    Console().print(summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
