"""`async-rl doctor`: would a run with this config work here, and would it keep its promises? Looks, and changes nothing."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.checks.findings import Finding, Verdict, fail, ok, warn
from async_rl.config.run import RunConfig

SYNCS = 20
SLOW_SYNC_S, HOPELESS_SYNC_S = 0.05, 1.0
LITTLE_DISK_BYTES, NO_DISK_BYTES = 10 * 2**30, 2**30
SHARED_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.sshfs", "9p", "glusterfs"})
VERSIONS_HELD = 3  # by a push through shared memory, when pushes are slower than steps
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
TORCH_TESTED = "2.13"
STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def check_machine(config: RunConfig) -> list[Finding]:
    """Run directory, network and libraries of this machine."""
    directory = existing_parent(config.run_dir)
    run_dir = [*check_run_dir(config.run_dir, directory), _shared(config, directory)]
    return [*run_dir, *_push_store(config), *_shared_memory(config), *_libraries(config)]


def is_broken(findings: Sequence[Finding]) -> bool:
    return any(finding.verdict is Verdict.FAIL for finding in findings)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """A line per finding: what was found, and what to change."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("checked", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to change", overflow="fold")
    for finding in findings:
        style = STYLES[finding.verdict]
        table.add_row(Text(finding.verdict.value, style), finding.name, Text(finding.found), Text(finding.advice))
    console.print(table)
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    console.print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count))


def existing_parent(path: Path) -> Path:
    """The nearest directory at or above `path` that is there."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


# -- run directory ---------------------------------------------------------------------------------------------------
def check_run_dir(run_dir: Path, directory: Path, *, now: Callable[[], float] = time.perf_counter) -> Iterator[Finding]:
    """Can it be written, how much room is there, how long does it take until something is really on the disk?"""
    free = shutil.disk_usage(directory).free
    found = f"{free / 2**30:.1f} GiB free at {directory}"
    if free < NO_DISK_BYTES:
        yield fail("free disk", found, "free space, or set run_dir elsewhere: log and checkpoints would soon find no room")
    elif free < LITTLE_DISK_BYTES:
        yield warn("free disk", found, "a checkpoint holds the model three times over in float32; the log every group")
    else:
        yield ok("free disk", found)
    try:
        taken = _sync_times(directory, now)
    except OSError as error:
        yield fail("run directory", f"{run_dir}: {error.strerror or error}", "set run_dir to a directory that can be written")
        return
    p50, worst = statistics.median(taken), max(taken)
    found = f"p50 {1000 * p50:.1f} ms, worst of {SYNCS} {1000 * worst:.1f} ms"
    if p50 > HOPELESS_SYNC_S:
        yield fail("fsync", found, "set run_dir to another disk: every batch of groups waits for it")
    elif p50 > SLOW_SYNC_S:
        yield warn("fsync", found, "a faster disk for run_dir: every batch of groups waits for it")
    else:
        yield ok("fsync", found)


def _sync_times(directory: Path, now: Callable[[], float]) -> list[float]:
    """Seconds per append of 4 KiB and fsync, in a file of its own beside the run. Also tries a lock, which a run needs."""
    taken: list[float] = []
    with tempfile.TemporaryFile(dir=directory) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for _ in range(SYNCS):
            file.write(b"\0" * 4096)
            file.flush()
            started = now()
            os.fsync(file.fileno())
            taken.append(now() - started)
    return taken


def _shared(config: RunConfig, directory: Path) -> Finding:
    kind = file_system_of(directory)
    shown = f"{directory} is on {kind or 'a file system that cannot be told here'}"
    if kind in SHARED_FILE_SYSTEMS or not _spans_machines(config):
        return ok("shared run directory", shown)
    advice = "every machine that may run the trainer's first rank must reach it: put it on shared storage, or keep rank 0 here"
    return warn("shared run directory", f"{shown}, and the run may span machines", advice)


def file_system_of(directory: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the file system that `directory` is on, where the kernel says (Linux)."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    path = directory.resolve()
    found: tuple[int, str] | None = None
    for fields in (line.split() for line in lines):
        point = Path(fields[1].replace("\\040", " "))
        if (point == path or point in path.parents) and (found is None or len(str(point)) >= found[0]):
            found = (len(str(point)), fields[2])
    return None if found is None else found[1]


# -- network ---------------------------------------------------------------------------------------------------------
def _spans_machines(config: RunConfig) -> bool:
    url = config.redis.url
    if url == "embedded" or url.startswith("unix://"):
        return False
    host = url.partition("://")[2].rpartition("@")[2].partition("/")[0].rpartition(":")[0].strip("[]")
    return host not in LOOPBACK


def _shared_memory(config: RunConfig) -> Iterator[Finding]:
    """Is there room for the versions that a push through shared memory holds?"""
    weights, name = config.weights, "shared memory"
    if weights.backend != "shm":
        return
    if not weights.shm_dir.is_dir():
        advice = "set weights.shm_dir to a memory file system, or use weights.backend = gloo"
        yield fail(name, f"weights.shm_dir={weights.shm_dir} is no directory", advice)
        return
    free = shutil.disk_usage(weights.shm_dir).free
    needed = VERSIONS_HELD * sum(path.stat().st_size for path in config.model.path.glob("*.safetensors"))
    found = f"{weights.shm_dir} has {free:,} bytes free; {VERSIONS_HELD} versions of the model take about {needed:,}"
    advice = (
        "make it larger (docker run --shm-size, compose shm_size, emptyDir with medium Memory), or use weights.backend = gloo"
    )
    yield ok(name, found) if free >= needed else fail(name, found, advice)


def _push_store(config: RunConfig) -> Iterator[Finding]:
    """May the trainer bind where engines are to fetch weights, and can engines elsewhere reach that?"""
    host, name = config.weights.host, "push store"
    if config.weights.backend in ("disk", "shm"):
        yield ok(name, f"not used by weights.backend = {config.weights.backend}")
        return
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(address)
            probe.listen(1)
            with socket.create_connection(probe.getsockname()[:2], timeout=2.0):
                pass
    except OSError as error:
        advice = "set weights.host to an address of the trainer's machine"
        yield fail(name, f"weights.host={host}: {error.strerror or error}", advice)
        return
    if host in LOOPBACK and _spans_machines(config):
        advice = "set weights.host to an address of this machine that the engines' machines reach, if there are any"
        yield warn(name, f"weights.host={host} is reachable from this machine alone", advice)
    else:
        yield ok(name, f"weights.host={host} can be bound and reached")


# -- libraries -------------------------------------------------------------------------------------------------------
def _libraries(config: RunConfig) -> Iterator[Finding]:
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} processors")
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        yield fail("torch", "not installed", f"pip install torch=={TORCH_TESTED}.0")
        return
    if torch_version.startswith(TORCH_TESTED + "."):
        yield ok("torch", torch_version)
    else:
        yield warn("torch", torch_version, f"made and tested with {TORCH_TESTED}: install that if something fails")
    yield _backend(config)
    threads = config.trainer.world_size * config.trainer.num_threads + config.rollout.workers * config.rollout.num_threads
    processors = os.cpu_count() or 1
    if threads > 2 * processors:
        advice = "lower trainer.num_threads and rollout.num_threads: roles that share processors slow each other down"
        yield warn("threads", f"{threads} of the roles on {processors} processors", advice)


def _backend(config: RunConfig) -> Finding:
    import torch.distributed  # only here: the other checks need none of it

    name = f"weights.backend = {config.weights.backend}"
    accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    if config.weights.backend == "gloo" and not torch.distributed.is_gloo_available():
        return fail("backend", f"{name}: this torch has no Gloo", "install a torch with Gloo, or set weights.backend = disk")
    return ok("backend", f"{name}, {accelerator}")
