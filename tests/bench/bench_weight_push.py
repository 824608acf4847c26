"""Weight pushes on one host: 135 M parameters in bfloat16, one sender and two receivers, against a broadcast per tensor.

python tests/bench/bench_weight_push.py [--out runs/bench] [--repeats 5] [--smoke]

A push begins when the sender holds all tensors in the wire's dtype, and ends when the slower receiver holds them in memory of
its own. The baseline holds them as tensors and broadcasts each from where it is to where it goes; `gloo_buckets` holds them in
the send buffer, into which the cast from the float32 masters writes them, and broadcasts its buckets over the same kind of
group; `shm` holds them in a segment, out of which both receivers copy. Nobody's cast is counted: all three need one. Rounds of
the three alternate. limit_share: bytes per second to each receiver over what one thread of this machine copies from memory to
memory. `gloo_buckets_copied` and `shm_copied` are the same pushes with what only a snapshot costs: another copy from tensors
into the buffer before, and with gloo one out of the staging memory afterwards.

`blocked_share`: what the trainer stands still for (float32 masters copied and cast into the send buffer; on one rank there is
nothing to gather), over the same push done inline: that, sending, and applying over Gloo, where applying is the swap into the
built-in engine's weights (in bfloat16, as the slower receiver does it). `blocked_share_with_probe` adds the trainer's forward
pass over the probe to both; `inline_*` are the seconds of its parts.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from async_rl.model.attention import PACKED
from async_rl.registry.versions import PushPlan
from async_rl.rollout.attention import ATTENTION_NAME
from async_rl.rollout.fused_llama import FusedLlamaForward
from async_rl.rollout.weight_store import WeightStore
from async_rl.testing.tiny_models import make_tiny_model
from async_rl.trainer.policy import PolicyModel
from async_rl.weights.collective_backend import CollectiveReceiver, CollectiveSender
from async_rl.weights.group import PushGroup, connect_store, host_store
from async_rl.weights.manifest import Manifest, Probe, Tolerance, decode_manifest, encode_manifest
from async_rl.weights.rates import memcpy_bytes_per_s
from async_rl.weights.send_buffer import SendBuffer, SendBufferPool
from async_rl.weights.shm_backend import ShmReceiver, ShmSender
from async_rl.weights.shm_segment import SegmentMemory
from async_rl.weights.transports import GLOO

MODEL = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
SMALL = {**MODEL, "num_hidden_layers": 2, "vocab_size": 4096}
RECEIVERS = ("receiver-0", "receiver-1")
KINDS = ("per_tensor", "gloo_buckets", "shm")
TIMEOUT_S = 60.0
PROBE_TOKENS = (32, 32)


def plan(store: str, generation: int) -> PushPlan:
    return PushPlan(1, 1, generation, RECEIVERS, store, TIMEOUT_S, planned_at_s=0.0)


# -- a receiver ------------------------------------------------------------------------------------------------------
class ReceiverProcess:
    """The other end, in a process of its own: a line in, a line out."""

    def __init__(self, index: int, manifests: Mapping[str, Manifest], stores: Mapping[str, str], engine: WeightStore) -> None:
        self._index = index
        self._manifests = manifests
        self._own = {entry.name: torch.zeros(entry.shape, dtype=torch.bfloat16) for entry in manifests["gloo_buckets"].entries}
        self._engine = engine
        self._received: Mapping[str, torch.Tensor] = {}
        self._staged: Mapping[str, torch.Tensor] = {}
        self._gloo, self._shm = CollectiveReceiver(timeout_s=TIMEOUT_S), ShmReceiver()
        self._plans = {kind: plan(stores[kind], generation) for generation, kind in enumerate(KINDS, 1)}
        self._group: PushGroup | None = None

    def take(self, kind: str) -> None:
        """Until all of it is held here."""
        if kind == "per_tensor":
            self._take_each()
            self._received = self._own
        elif kind == "gloo_buckets":
            self._staged = self._gloo.receive(self._plans[kind], RECEIVERS[self._index], self._manifests[kind])
            self._received = self._staged
        else:
            self._copy(self._shm.receive(self._plans[kind], RECEIVERS[self._index], self._manifests[kind]))

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._own[name].copy_(tensor)
        self._received = self._own

    def copy_and_apply(self, kind: str) -> tuple[float, float]:
        """Seconds of a copy out of staging memory into other tensors, and of the engine's swap; of gloo_buckets alone."""
        if kind != "gloo_buckets":
            return 0.0, 0.0
        received, started = self._received, time.perf_counter()
        self._copy(received)
        copied = time.perf_counter()
        self._engine.copy(self._manifests[kind], received)
        return copied - started, time.perf_counter() - copied

    def _take_each(self) -> None:
        if self._group is None:
            one = self._plans["per_tensor"]
            store = connect_store(one.store_address, TIMEOUT_S)
            self._group = PushGroup(GLOO, store, one, rank=self._index + 1, host="127.0.0.1", timeout_s=TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        self._group.broadcast(tuple(t.view(-1) for t in self._own.values()), deadline=deadline)

    def total(self) -> float:
        return float(sum(tensor.double().sum() for tensor in self._received.values()))

    def clear(self) -> None:
        """So that what is held afterwards has come."""
        for tensor in (*self._own.values(), *self._staged.values()):
            tensor.zero_()


def child(index: int, directory: Path) -> None:
    torch.set_num_threads(1)
    manifests = {kind: decode_manifest((directory / kind).read_bytes()) for kind in KINDS[1:]}
    stores, sizes = (json.loads((directory / name).read_text()) for name in ("stores.json", "sizes.json"))
    receiver = ReceiverProcess(index, manifests, stores, make_engine(sizes))
    print("up", flush=True)
    for line in sys.stdin:
        receiver.clear()
        print("ready", flush=True)
        sys.stdin.readline()  # go
        receiver.take(line.strip())
        ended = time.monotonic()
        print(ended, receiver.total(), *receiver.copy_and_apply(line.strip()), flush=True)


def make_engine(sizes: Mapping[str, int]) -> WeightStore:
    """The weights of the built-in engine, laid out as it decodes with them."""
    model = make_tiny_model("llama_tied", attn_implementation=ATTENTION_NAME, **sizes)
    model.bfloat16()
    FusedLlamaForward(model)
    return WeightStore(model)


class Child:
    def __init__(self, index: int, directory: Path) -> None:
        command = [sys.executable, __file__, "--child", str(index), "--directory", str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a receiver ended with exit code {self._process.wait()}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# -- the sender ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Round:
    """Seconds of one push until the slower receiver holds it; of a copy into the send buffer before; of the slower receiver's
    copy out of its staging memory; and of its engine's swap."""

    move_s: float
    fill_s: float = 0.0
    copy_s: float = 0.0
    apply_s: float = 0.0

    @property
    def copied_s(self) -> float:
        return self.fill_s + self.move_s + self.copy_s


class Bench:
    """The sender, with a model of float32 masters and its tensors in the wire's dtype."""

    def __init__(self, directory: Path, sizes: Mapping[str, int], shm_dir: Path) -> None:
        self.policy = PolicyModel(make_tiny_model("llama_tied", attn_implementation=PACKED, **sizes))
        self._wire = [(name, tensor.to(torch.bfloat16)) for name, tensor in self.policy.named_full_tensors()]
        self._expected = float(sum(tensor.double().sum() for _, tensor in self._wire))
        self._memory = SegmentMemory(shm_dir, f"bench-{secrets.token_hex(4)}")
        self._pools = {
            "gloo_buckets": SendBufferPool("bfloat16", 64 * 2**20),
            "shm": SendBufferPool("bfloat16", 64 * 2**20, self._memory),
        }
        self._buffers = {kind: pool.copy_from(self._wire) for kind, pool in self._pools.items()}
        self.num_bytes = self._buffers["shm"].num_bytes
        self._sender = CollectiveSender(host="127.0.0.1", timeout_s=TIMEOUT_S)
        self._store = host_store("127.0.0.1")
        self._stores = {
            "per_tensor": f"127.0.0.1:{self._store.port}",
            "gloo_buckets": self._sender.address,
            "shm": "",
        }
        self._plans = {kind: plan(self._stores[kind], generation) for generation, kind in enumerate(KINDS, 1)}
        self._group: PushGroup | None = None
        (directory / "sizes.json").write_text(json.dumps(dict(sizes)))
        self._write(directory)
        self._children = [Child(index, directory) for index in range(len(RECEIVERS))]
        for receiver in self._children:
            receiver.read()

    def push(self, kind: str) -> Round:
        for receiver in self._children:
            receiver.say(kind)
        for receiver in self._children:
            receiver.read()
        started = time.monotonic()
        if kind != "per_tensor":
            self._buffers[kind].fill(self._wire)
        filled = time.monotonic()
        for receiver in self._children:
            receiver.say("go")
        self._send(kind)
        answers = [tuple(map(float, receiver.read().split())) for receiver in self._children]
        ends, totals, copies, applies = zip(*answers, strict=True)
        if any(abs(total - self._expected) > 1e-6 * abs(self._expected) + 1e-6 for total in totals):
            raise RuntimeError(f"{kind}: the receivers do not hold what was sent")
        return Round(max(ends) - filled, filled - started, max(copies), max(applies))

    def snapshot(self) -> tuple[float, float]:
        """Seconds of a snapshot of the float32 masters, and of the trainer's pass over a probe."""
        started = time.monotonic()
        self._buffers["gloo_buckets"].fill(self.policy.named_full_tensors())
        copied = time.monotonic()
        self.policy.score([np.arange(3, 3 + n).tolist() for n in PROBE_TOKENS], temperature=1.0)
        return copied - started, time.monotonic() - copied

    def close(self) -> None:
        for receiver in self._children:
            receiver.close()
        self._sender.close()
        self._memory.close()

    def _send(self, kind: str) -> None:
        if kind == "gloo_buckets":
            self._sender.send(self._plans[kind], self._buffers[kind])
        elif kind == "per_tensor":
            if self._group is None:
                one = self._plans[kind]
                self._group = PushGroup(GLOO, self._store, one, rank=0, host="127.0.0.1", timeout_s=TIMEOUT_S)
            deadline = time.monotonic() + TIMEOUT_S
            self._group.broadcast(tuple(tensor.view(-1) for _, tensor in self._wire), deadline=deadline)

    def _write(self, directory: Path) -> None:
        for kind, buffer in self._buffers.items():
            manifest = manifest_of(buffer)
            manifest = ShmSender().prepare(manifest, buffer) if kind == "shm" else manifest
            (directory / kind).write_bytes(encode_manifest(manifest))
        (directory / "stores.json").write_text(json.dumps(self._stores))


def manifest_of(buffer: SendBuffer) -> Manifest:
    return buffer.manifest(epoch=1, version=1, probe=Probe((), (), 1.0), tolerance=Tolerance(1e-4))


@dataclass(frozen=True)
class Metric:
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    limit_share: float | None


def measure(repeats: int, sizes: Mapping[str, int], shm_dir: Path) -> dict[str, Metric]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), sizes, shm_dir)
        try:
            rounds: dict[str, list[Round]] = {kind: [] for kind in KINDS}
            snapshots: list[tuple[float, float]] = []
            limits: list[float] = []
            for number in range(repeats + 1):  # the first round meets, maps and touches pages: not counted
                for kind in KINDS:
                    rounds[kind].append(bench.push(kind))
                snapshots.append(bench.snapshot())
                limits.append(memcpy_bytes_per_s())
                if number == 0:
                    rounds = {kind: [] for kind in KINDS}
                    snapshots, limits = [], []
        finally:
            bench.close()
        num_bytes = bench.num_bytes
    return figures(num_bytes, rounds, snapshots, statistics.median(limits) / 1e9)


def figures(
    num_bytes: int, rounds: Mapping[str, Sequence[Round]], snapshots: Sequence[tuple[float, float]], limit: float
) -> dict[str, Metric]:
    baseline = [num_bytes / one.move_s / 1e9 for one in rounds["per_tensor"]]
    metrics = {}
    for kind in ("shm", "gloo_buckets"):
        metrics[kind] = _rate([num_bytes / one.move_s / 1e9 for one in rounds[kind]], baseline, limit)
        metrics[f"{kind}_copied"] = _rate([num_bytes / one.copied_s / 1e9 for one in rounds[kind]], baseline, limit)
    inline = [one.move_s + one.apply_s for one in rounds["gloo_buckets"]]
    metrics["blocked_share"] = _share([copy for copy, _ in snapshots], inline)
    metrics["blocked_share_with_probe"] = _share([copy + probe for copy, probe in snapshots], inline)
    parts = {"snapshot": [copy for copy, _ in snapshots], "probe": [probe for _, probe in snapshots]}
    parts["send"] = [one.move_s for one in rounds["gloo_buckets"]]
    parts["apply"] = [one.apply_s for one in rounds["gloo_buckets"]]
    metrics |= {f"inline_{name}": _seconds(values) for name, values in parts.items()}
    return metrics


def _rate(values: Sequence[float], baseline: Sequence[float], limit: float) -> Metric:
    value = statistics.median(values)
    ratio = statistics.median(mine / theirs for mine, theirs in zip(values, baseline, strict=True))
    return Metric(round(value, 3), "GB/s", round(statistics.median(baseline), 3), round(ratio, 3), round(value / limit, 3))


def _share(blocked: Sequence[float], moved: Sequence[float]) -> Metric:
    """value: blocked over inline; baseline: seconds of the inline push."""
    inline = [stop + move for stop, move in zip(blocked, moved, strict=True)]
    share = statistics.median(stop / whole for stop, whole in zip(blocked, inline, strict=True))
    return Metric(round(share, 4), "inline", round(statistics.median(inline), 4), round(share, 4), None)


def _seconds(values: Sequence[float]) -> Metric:
    return Metric(round(statistics.median(values), 4), "s", None, None, None)


def show(metrics: Mapping[str, Metric]) -> None:
    table = Table(title="weight push, one sender and two receivers")
    for column in ("metric", "value", "baseline", "ratio", "share of memcpy"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, metric in metrics.items():
        share = "" if metric.limit_share is None else f"{metric.limit_share:.2f}"
        unit = "s" if name.startswith("blocked") else metric.unit
        baseline = "" if metric.baseline is None else f"{metric.baseline} {unit}"
        table.add_row(
            name, f"{metric.value:.3f} {metric.unit}", baseline, "" if metric.ratio is None else f"{metric.ratio:.2f}", share
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one short turn of everything, to see that it runs")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.directory)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no segment is left
    repeats, sizes = (1, SMALL) if arguments.smoke else (arguments.repeats, MODEL)
    metrics = measure(repeats, sizes, arguments.shm_dir)
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = json.dumps({name: asdict(metric) for name, metric in metrics.items()}, indent=2)
    (arguments.out / "weight_push.json").write_text(content + "\n")
    show(metrics)


if __name__ == "__main__":
    main()
