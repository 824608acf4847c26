"""How many messages a second go from process to process through Redis, with everything that a run needs around them.

ours      lease the task, encode, publish (Lua), read COUNT 128 behind the fence, decode, finish (Lua), heartbeats
baseline  pickled lists, one XADD each, XREAD COUNT 1
redis     the limit of the server: the same bytes, XADD in pipelines of 128, XREADGROUP COUNT 128, XACK; no coding
zmq       the limit of a pipe: the same bytes over PUSH/PULL on ipc; no coding, nothing kept

All four take turns on one server (unix socket, AOF; the embedded server with its own settings), each beginning with an empty
one. `value` and `baseline` are messages a second, medians over the rounds; `limit_share` is ours by redis; `cpu_us` is the CPU
time of each process for one message, which a busy machine disturbs less than the rates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil
import redis as redis_py
from rich.console import Console
from rich.table import Table
from transport_ways import BATCH, CONSUMERS, PRODUCERS, Job, prepare_ours

from async_rl.launch.embedded_redis import EmbeddedRedis
from async_rl.launch.processes import ALLOCATOR
from protocol import event_loop

JOIN_TIMEOUT_S = 120.0
Durability: TypeAlias = Literal["always", "everysec"]
TOKENS = {"512": 512, "16k": 16384}


# -- measuring -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measured:
    """One measurement: messages a second, and the CPU time (µs a message) of each process that took part."""

    rate: float
    cpu_us: Mapping[str, float]


class _CpuMeter:
    """What a process computes after the start that all agree on."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier
        self._begin_s = 0.0

    def start(self) -> None:
        self._barrier.wait(JOIN_TIMEOUT_S)
        self._begin_s = time.process_time()

    def seconds(self) -> float:
        return time.process_time() - self._begin_s


def _producer(job: Job, barrier: Barrier, results: Any) -> None:
    meter = _CpuMeter(barrier)
    PRODUCERS[job.way](job, meter.start)
    results.put(("producer", 0.0, meter.seconds()))


def _consumer(job: Job, barrier: Barrier, results: Any) -> None:
    meter = _CpuMeter(barrier)
    seconds = CONSUMERS[job.way](job, meter.start)
    results.put(("consumer", seconds, meter.seconds()))


def measure(job: Job, server: psutil.Process) -> Measured:
    """From the start that both processes agree on to the last acknowledgement.

    Every process gets the environment that the launcher gives its roles.
    """
    os.environ.update(ALLOCATOR)
    if job.way == "ours":
        event_loop.run(prepare_ours(job))
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=role, args=(job, barrier, results)) for role in (_producer, _consumer)]
    before_s = _cpu_s(server)
    for process in processes:
        process.start()
    try:
        reports = [results.get(timeout=JOIN_TIMEOUT_S) for _ in processes]
        for process in processes:
            process.join(JOIN_TIMEOUT_S)
            assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
    cpu_s = {name: used_s for name, _, used_s in reports} | {"server": _cpu_s(server) - before_s}
    seconds = max(wall_s for _, wall_s, _ in reports)
    return Measured(job.num_messages / seconds, {name: used_s / job.num_messages * 1e6 for name, used_s in cpu_s.items()})


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _empty(url: str) -> None:
    """Everybody begins with an empty server and a short append-only file, so nobody pays for rewriting another's."""
    client = redis_py.Redis.from_url(url)
    client.flushall()
    client.bgrewriteaof()
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while client.info("persistence")["aof_rewrite_in_progress"]:
        assert time.monotonic() < deadline, "the server does not finish rewriting its append-only file"
        time.sleep(0.02)


NUM_MESSAGES = {
    "512": {"ours": 16384, "baseline": 4096, "redis": 16384, "zmq": 32768},
    "16k": {"ours": 1536, "baseline": 512, "redis": 1536, "zmq": 3072},
}
Rounds: TypeAlias = dict[str, list[Measured]]


def run_mode(durability: Durability, rounds: int, scale: float) -> dict[str, Rounds]:
    """Metric suffix → way → what each round measured. The ways take turns, so a busy moment does not hit one of them alone."""
    measured: dict[str, Rounds] = {size: {way: [] for way in PRODUCERS} for size in TOKENS}
    with (
        tempfile.TemporaryDirectory(prefix="arl-") as directory,
        EmbeddedRedis(Path(directory) / "redis", appendfsync=durability) as server,
    ):
        for _ in range(rounds):
            for size, num_tokens in TOKENS.items():
                for way in PRODUCERS:
                    _empty(server.url)
                    address = f"ipc://{directory}/zmq" if way == "zmq" else server.url
                    job = Job(way, address, num_tokens, max(BATCH, int(NUM_MESSAGES[size][way] * scale)))
                    measured[size][way].append(measure(job, psutil.Process(server.pid)))
    return measured


def metrics_of(modes: Mapping[Durability, dict[str, Rounds]]) -> dict[str, dict[str, object]]:
    metrics: dict[str, dict[str, object]] = {}
    for durability, sizes in modes.items():
        for size, ways in sizes.items():
            rate = {way: statistics.median([one.rate for one in rounds]) for way, rounds in ways.items()}
            pairs = zip(ways["ours"], ways["baseline"], strict=True)
            metrics[f"msgs_{size}" if durability == "always" else f"msgs_{size}_{durability}"] = {
                "value": rate["ours"],
                "unit": "messages/s",
                "baseline": rate["baseline"],
                "ratio": rate["ours"] / rate["baseline"],
                "ratio_of_each_round": [ours.rate / baseline.rate for ours, baseline in pairs],
                "limit_share": rate["ours"] / rate["redis"],
                "limit": rate["redis"],
                "zmq": rate["zmq"],
                "zmq_share": rate["ours"] / rate["zmq"],
                "cpu_us": {way: _median_cpu_us(rounds) for way, rounds in ways.items()},
                "appendfsync": durability,
            }
    return metrics


def _median_cpu_us(rounds: Sequence[Measured]) -> dict[str, float]:
    return {name: statistics.median([one.cpu_us[name] for one in rounds]) for name in rounds[0].cpu_us}


def show(metrics: dict[str, dict[str, Any]]) -> None:
    table = Table(
        "metric",
        "appendfsync",
        "ours",
        "baseline",
        "ratio",
        "cpu µs ours",
        "baseline",
        "raw redis",
        "share",
        "zmq",
        "share",
        title="transport, messages/s",
    )
    for name, m in metrics.items():
        cells: Iterable[str] = (
            f"{m['value']:,.0f}", f"{m['baseline']:,.0f}", f"{m['ratio']:.1f}x",
            f"{sum(m['cpu_us']['ours'].values()):.0f}", f"{sum(m['cpu_us']['baseline'].values()):.0f}", f"{m['limit']:,.0f}",
            f"{m['limit_share']:.2f}", f"{m['zmq']:,.0f}", f"{m['zmq_share']:.2f}",
        )  # fmt: skip
        table.add_row(name, m["appendfsync"], *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--appendfsync", nargs="+", choices=("always", "everysec"), default=("always", "everysec"))
    parser.add_argument("--smoke", action="store_true", help="one short turn of everything, to see that it runs")
    arguments = parser.parse_args()
    rounds, scale = (1, 0.05) if arguments.smoke else (arguments.rounds, arguments.scale)
    metrics = metrics_of({mode: run_mode(mode, rounds, scale) for mode in arguments.appendfsync})
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "transport.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    show(metrics)


if __name__ == "__main__":
    main()
