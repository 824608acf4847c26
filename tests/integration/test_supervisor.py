"""The supervisor over small real processes: whatever happens, nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.errors import QueueUnavailable, RoleFailed
from async_rl.launch.processes import RoleSpec
from async_rl.launch.supervisor import Patience, StopRequest, Supervisor, catch_stop_signals
from async_rl.testing.processes import children

QUICK = Patience(poll_s=0.02, stop_s=0.6, ending_s=0.6)
PATIENT = Patience(poll_s=0.02, stop_s=20.0, ending_s=20.0)
FOREVER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
WITH_CHILD = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print(child.pid, flush=True); "
)


def role(name: str, code: str, *, leads: bool = False, **env: str) -> RoleSpec:
    return RoleSpec(name, (sys.executable, "-c", code), env, leads=leads)


def supervisor_of(roles: Sequence[RoleSpec], logs_dir: Path, **settings: Any) -> Supervisor:
    return Supervisor(lambda: roles, logs_dir, **settings)


def after(path: Path, text: str = "up") -> str:
    """Code that waits until the file at `path` holds `text`."""
    return (
        "import pathlib, time\n"
        f"path = pathlib.Path({str(path)!r})\n"
        f"while not path.exists() or {text!r} not in path.read_text(): time.sleep(0.01)\n"
    )


def nothing_left() -> bool:
    return not children()


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def wait_for(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_the_last_evaluation_has_time_of_its_own_and_whoever_hangs_has_not(tmp_path: Path) -> None:
    says_when_it_is_ended = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('ended'), sys.exit(0)))\n"
    )
    roles = [
        role("trainer", after(tmp_path / "rollout.out") + "print('finished')", leads=True),
        role("rollout", f"{says_when_it_is_ended}print('up', flush=True)\ntime.sleep(600)"),
        RoleSpec("evaluation", (sys.executable, "-c", after(tmp_path / "rollout.out", "ended") + "print('done')"), {},
                 kind="evaluation"),
    ]  # fmt: skip
    patience = Patience(poll_s=0.02, stop_s=5.0, ending_s=0.5, finish_s=60.0)
    assert supervisor_of(roles, tmp_path, patience=patience).run(StopRequest()) is None
    assert "done" in (tmp_path / "evaluation.out").read_text()
    assert nothing_left()


def test_the_run_is_over_when_the_trainer_ended_well_and_the_others_end_by_themselves(tmp_path: Path) -> None:
    follower = after(tmp_path / "trainer.out", "finished") + "print('saw the end')"
    supervisor = supervisor_of(
        [role("rollout-0", follower), role("trainer", "print('finished', flush=True)", leads=True)], tmp_path, patience=PATIENT
    )
    assert supervisor.run(StopRequest()) is None
    assert "saw the end" in (tmp_path / "rollout-0.out").read_text()
    assert nothing_left()


def test_a_role_that_does_not_end_after_the_trainer_is_told_to_then_killed(tmp_path: Path) -> None:
    leader = after(tmp_path / "rollout-0.out")
    started = time.monotonic()
    supervisor = supervisor_of([role("rollout-0", STUBBORN), role("trainer", leader, leads=True)], tmp_path, patience=QUICK)
    assert supervisor.run(StopRequest()) is None
    assert time.monotonic() - started < 10
    assert nothing_left()


def test_the_first_failure_stops_everybody_and_shows_the_failing_roles_last_lines(tmp_path: Path) -> None:
    failing = after(tmp_path / "trainer.out") + "print('the disk is full'); raise SystemExit(7)"
    supervisor = supervisor_of([role("trainer", FOREVER, leads=True), role("rollout-0", failing)], tmp_path, patience=PATIENT)
    with pytest.raises(RoleFailed, match=r"rollout-0 failed \(exit code 7\)[\s\S]*the disk is full") as caught:
        supervisor.run(StopRequest())
    assert caught.value.exit_code == 7
    assert nothing_left()


def test_only_what_this_start_printed_is_shown(tmp_path: Path) -> None:
    (tmp_path / "trainer.out").write_text("of an earlier start\n")
    supervisor = supervisor_of([role("trainer", "raise SystemExit('of this start')", leads=True)], tmp_path, patience=QUICK)
    with pytest.raises(RoleFailed) as caught:
        supervisor.run(StopRequest())
    assert "of this start" in str(caught.value)
    assert "of an earlier start" not in str(caught.value)
    assert (tmp_path / "trainer.out").read_text().startswith("of an earlier start\n")


def test_a_killed_role_is_reported_with_its_signal(tmp_path: Path) -> None:
    suicide = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RoleFailed, match=r"trainer failed \(killed by SIGKILL\)") as caught:
        supervisor_of([role("trainer", suicide, leads=True)], tmp_path, patience=QUICK).run(StopRequest())
    assert caught.value.exit_code == 1  # 137 would say that the supervisor itself was killed


def test_a_command_that_does_not_exist_is_a_failed_role(tmp_path: Path) -> None:
    with pytest.raises(RoleFailed, match="cannot start /no/such/program"):
        supervisor_of([RoleSpec("trainer", ("/no/such/program",), leads=True)], tmp_path, patience=QUICK).run(StopRequest())


def test_a_signal_stops_all_roles_and_the_trainer_gets_time_to_write(tmp_path: Path) -> None:
    writer = (
        "import signal, sys, time\n"
        "def stop(*_):\n    time.sleep(0.3); print('checkpoint written', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); print('up', flush=True); time.sleep(600)"
    )
    stop = StopRequest()
    interrupter = threading.Thread(
        target=lambda: wait_for(lambda: "up" in _read(tmp_path / "trainer.out")) and stop.receive(signal.SIGINT, None)
    )
    interrupter.start()
    supervisor = supervisor_of([role("trainer", writer, leads=True), role("rollout-0", FOREVER)], tmp_path, patience=PATIENT)
    assert supervisor.run(stop) == signal.SIGINT
    interrupter.join()
    assert "checkpoint written" in _read(tmp_path / "trainer.out")
    assert nothing_left()


def test_a_role_that_ignores_sigterm_is_killed_when_patience_ends(tmp_path: Path) -> None:
    stop = StopRequest()
    interrupter = threading.Thread(
        target=lambda: wait_for(lambda: "up" in _read(tmp_path / "trainer.out")) and stop.receive(signal.SIGTERM, None)
    )
    interrupter.start()
    assert supervisor_of([role("trainer", STUBBORN, leads=True)], tmp_path, patience=QUICK).run(stop) == signal.SIGTERM
    interrupter.join()
    assert nothing_left()


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    stop = StopRequest()

    def interrupt_twice() -> None:
        wait_for(lambda: "up" in _read(tmp_path / "trainer.out"))
        stop.receive(signal.SIGINT, None)
        time.sleep(0.2)
        stop.receive(signal.SIGINT, None)

    interrupter = threading.Thread(target=interrupt_twice)
    interrupter.start()
    started = time.monotonic()
    assert supervisor_of([role("trainer", STUBBORN, leads=True)], tmp_path, patience=PATIENT).run(stop) == signal.SIGINT
    interrupter.join()
    assert time.monotonic() - started < 10  # PATIENT would wait 20 s
    assert nothing_left()


def test_what_a_role_started_ends_with_it(tmp_path: Path) -> None:
    crashing = WITH_CHILD + "raise SystemExit(3)"
    with pytest.raises(RoleFailed):
        supervisor_of([role("reward-0", crashing), role("trainer", FOREVER, leads=True)], tmp_path).run(StopRequest())
    assert gone(int(_read(tmp_path / "reward-0.out").split()[0]))
    assert nothing_left()


def test_a_failed_check_stops_everybody(tmp_path: Path) -> None:
    def check() -> None:
        if "up" in _read(tmp_path / "trainer.out"):
            raise QueueUnavailable("the embedded server ended")

    with pytest.raises(QueueUnavailable):
        supervisor_of([role("trainer", FOREVER, leads=True)], tmp_path, patience=QUICK, check=check).run(StopRequest())
    assert nothing_left()


def test_without_the_server_roles_get_little_time_to_end(tmp_path: Path) -> None:
    def check() -> None:
        if (tmp_path / "trainer.out").exists() and "up" in (tmp_path / "trainer.out").read_text():
            raise QueueUnavailable("the server ended")

    patience = Patience(poll_s=0.02, stop_s=60.0, stop_lost_s=0.2)
    started = time.monotonic()
    with pytest.raises(QueueUnavailable, match="the server ended"):
        supervisor_of([role("trainer", STUBBORN, leads=True)], tmp_path, patience=patience, check=check).run(StopRequest())
    assert time.monotonic() - started < 30
    assert nothing_left()


def test_roles_get_their_environment_and_no_standard_input(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))"
    supervisor_of([role("trainer", code, leads=True, RANK="3")], tmp_path, patience=QUICK).run(StopRequest())
    assert _read(tmp_path / "trainer.out").strip() == "3 ''"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_roles_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from async_rl.launch.processes import RoleSpec\n"
        "from async_rl.launch.supervisor import StopRequest, Supervisor\n"
        f"code = {STUBBORN!r}.replace(\"'up'\", 'os.getpid()').replace('import ', 'import os, ', 1)\n"
        f"roles = [RoleSpec('trainer', (sys.executable, '-c', code), leads=True)]\n"
        f"Supervisor(lambda: roles, Path({str(tmp_path)!r})).run(StopRequest())"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script])
    assert wait_for(lambda: _read(tmp_path / "trainer.out").endswith("\n"))
    pid = int(_read(tmp_path / "trainer.out"))
    supervisor.kill()
    supervisor.wait()
    assert gone(pid)


def test_signals_are_collected_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with catch_stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(lambda: len(stop.signals) == 2)
    assert stop.signals == [signal.SIGINT, signal.SIGTERM]
    assert stop.signum == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
