"""What the supervisor does about roles that die, hang, drain or cannot work, over small real processes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import DeadlineExceeded, RoleFailed
from async_rl.launch.lease_watch import LeaseView
from async_rl.launch.processes import RoleSpec
from async_rl.launch.restarts import RestartPolicy
from async_rl.launch.supervisor import Patience, StopRequest, Supervisor
from async_rl.logs import Event
from async_rl.testing.processes import children

FOREVER = "import time; time.sleep(600)"
POLICY = RestartPolicy(max_restarts=3, backoff_s=0.02, max_backoff_s=0.05)


class KnownLeases:
    """Leases as a test says."""

    def __init__(self, view: Callable[[float], LeaseView]) -> None:
        self._view = view
        self._started = time.monotonic()
        self.given_up: list[str] = []

    @property
    def view(self) -> LeaseView:
        return self._view(self._started)

    def give_up(self, worker_id: str) -> None:
        self.given_up.append(worker_id)


class Run:
    """A supervisor and what it told."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.events: list[tuple[Event, Mapping[str, object]]] = []
        self._path = tmp_path
        self._settings = {
            "policy": POLICY,
            "patience": Patience(poll_s=0.02, stop_s=0.5, ending_s=0.5),
            "on_event": self._note,
            **settings,
        }

    def _note(self, event: Event, **fields: object) -> None:
        self.events.append((event, fields))

    def see(self, *roles: RoleSpec) -> int | None:
        return Supervisor(lambda: roles, self._path, **self._settings).run(StopRequest())

    def named(self, event: Event) -> Sequence[Mapping[str, object]]:
        return [fields for name, fields in self.events if name is event]


def role(name: str, code: str, **fields: Any) -> RoleSpec:
    return RoleSpec(name, (sys.executable, "-c", code), **fields)


def starts(path: Path, then: str) -> str:
    """Code that notes its start in `path` and goes on with `then`, where `number` counts the starts from 1."""
    return f"open({str(path)!r}, 'a').write('x'); number = len(open({str(path)!r}).read())\n{then}"


def nothing_left() -> bool:
    return not children()


def test_a_killed_role_starts_again_and_both_are_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    killed_twice = starts(tmp_path / "n", "import os\nif number < 3: os.kill(os.getpid(), 9)")
    assert run.see(role("trainer", killed_twice, leads=True)) is None
    assert [fields["reason"] for fields in run.named(Event.ROLE_FAILED)] == ["killed by SIGKILL"] * 2
    assert [fields["count"] for fields in run.named(Event.ROLE_RESTARTED)] == [1, 2]
    assert nothing_left()


@pytest.mark.parametrize("code", [2, 3, 4, 8])
def test_what_another_start_cannot_mend_ends_the_run_at_once(tmp_path: Path, code: int) -> None:
    hopeless = starts(tmp_path / "n", f"raise SystemExit({code})")
    with pytest.raises(RoleFailed) as caught:
        Run(tmp_path).see(role("trainer", FOREVER, leads=True), role("rollout-0", hopeless, kind="rollout"))
    assert caught.value.exit_code == code
    assert (tmp_path / "n").read_text() == "x"
    assert nothing_left()


@pytest.mark.parametrize(("code", "starts_of_trainer", "starts_of_worker"), [(5, 1, 2), (6, 2, 2), (1, 2, 2)])
def test_who_waited_in_vain_for_the_others_is_not_started_again_but_a_worker_that_did_is(
    tmp_path: Path, code: int, starts_of_trainer: int, starts_of_worker: int
) -> None:
    policy = RestartPolicy(max_restarts=1, backoff_s=0.01, max_backoff_s=0.01)
    for name, kind, expected in (("trainer", "", starts_of_trainer), ("rollout-0", "rollout", starts_of_worker)):
        seen = tmp_path / f"starts of {name}"
        roles = [role(name, starts(seen, f"raise SystemExit({code})"), kind=kind, leads=not kind)]
        if kind:
            roles.append(role("trainer", FOREVER, leads=True))
        with pytest.raises(RoleFailed):
            Run(tmp_path, policy=policy, floors={"rollout": 1} if kind else {}).see(*roles)
        assert seen.read_text() == "x" * expected
    assert nothing_left()


def test_a_lost_rank_restarts_all_ranks(tmp_path: Path) -> None:
    first = starts(tmp_path / "first", "import time\nif number == 1: time.sleep(600)")
    second = starts(tmp_path / "second", "import os, time\nif number == 1: time.sleep(0.3); os.kill(os.getpid(), 9)")
    run = Run(tmp_path)
    ranks = [role("trainer-0", first, leads=True, unit="trainer"), role("trainer-1", second, leads=True, unit="trainer")]
    assert run.see(*ranks) is None
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == ["xx", "xx"]
    (failure,) = run.named(Event.ROLE_FAILED)
    assert (failure["name"], failure["failed"]) == ("trainer", "trainer-1")


def test_a_worker_over_its_cap_is_given_up_and_the_run_goes_on_with_the_others(tmp_path: Path) -> None:
    dying = starts(tmp_path / "n", "import os; os.kill(os.getpid(), 9)")
    leader = f"import time\nwhile len(open({str(tmp_path / 'n')!r}).read()) < 4: time.sleep(0.02)\ntime.sleep(0.3)"
    (tmp_path / "n").touch()
    run = Run(tmp_path, floors={"rollout": 1})
    workers = [role("rollout-0", dying, kind="rollout"), role("rollout-1", FOREVER, kind="rollout")]
    assert run.see(role("trainer", leader, leads=True), *workers) is None
    assert (tmp_path / "n").read_text() == "x" * 4
    assert [fields["name"] for fields in run.named(Event.ROLE_GIVEN_UP)] == ["rollout-0"]


def test_when_too_few_workers_can_be_kept_alive_the_run_ends_with_their_reason(tmp_path: Path) -> None:
    run = Run(tmp_path, floors={"rollout": 1})
    with pytest.raises(RoleFailed, match=r"rollout-0 failed 4 times.*killed by SIGKILL"):
        run.see(role("trainer", FOREVER, leads=True), role("rollout-0", "import os; os.kill(os.getpid(), 9)", kind="rollout"))
    assert nothing_left()


def test_too_few_leases_for_too_long_end_the_run(tmp_path: Path) -> None:
    leases = KnownLeases(lambda started: LeaseView(started, {}, {"rollout-9": "rollout"}))
    patience = Patience(poll_s=0.02, stop_s=0.5, below_floor_s=0.1)
    with pytest.raises(DeadlineExceeded, match="1 rollout workers hold a lease, 2 must"):
        Run(tmp_path, floors={"rollout": 2}, leases=leases, patience=patience).see(role("trainer", FOREVER, leads=True))
    assert nothing_left()


@pytest.mark.parametrize(("start_s", "seen", "outlasts"), [(60.0, False, True), (0.1, False, False), (60.0, True, False)])
def test_a_worker_that_starts_has_the_time_to_start_beside_the_grace(
    tmp_path: Path, start_s: float, seen: bool, outlasts: bool
) -> None:
    leases = KnownLeases(lambda started: LeaseView(started, {"w": started} if seen else {}, {}))
    patience = Patience(poll_s=0.02, stop_s=0.5, ending_s=0.1, hang_s=0.0, start_s=start_s, below_floor_s=0.1)
    run = Run(tmp_path, floors={"rollout": 1}, leases=leases, patience=patience)
    roles = [
        role("trainer", "import time; time.sleep(1.0)", leads=True),
        role("rollout-0", FOREVER, kind="rollout", worker_id="w"),
    ]
    if outlasts:
        assert run.see(*roles) is None
    else:
        with pytest.raises(DeadlineExceeded, match="0 rollout workers hold a lease, 1 must"):
            run.see(*roles)
    assert nothing_left()


def test_workers_that_were_started_elsewhere_count(tmp_path: Path) -> None:
    leases = KnownLeases(lambda started: LeaseView(started, {}, {"rollout-9": "rollout"}))
    patience = Patience(poll_s=0.02, stop_s=0.5, ending_s=0.1, below_floor_s=0.05)
    run = Run(tmp_path, floors={"rollout": 1}, leases=leases, patience=patience)
    assert run.see(role("trainer", "import time; time.sleep(0.4)", leads=True)) is None


@pytest.mark.parametrize("code", ["pass", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_worker_that_drains_did_not_fail(tmp_path: Path, code: str) -> None:
    run = Run(tmp_path)
    leader = "import time; time.sleep(0.4)"
    assert run.see(role("trainer", leader, leads=True), role("rollout-0", code, kind="rollout")) is None
    assert run.events == []


@pytest.mark.parametrize("code", ["pass", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
def test_the_only_worker_that_drains_while_the_run_goes_on_starts_again_at_once(tmp_path: Path, code: str) -> None:
    once = starts(tmp_path / "n", f"import time\nif number > 1: time.sleep(600)\n{code}")
    leader = f"import time\nwhile len(open({str(tmp_path / 'n')!r}).read()) < 2: time.sleep(0.02)"
    (tmp_path / "n").touch()
    leases = KnownLeases(lambda started: LeaseView(started, {}, {}, answered_at=time.monotonic()))
    run = Run(tmp_path, floors={"rollout": 1}, leases=leases)
    assert run.see(role("trainer", leader, leads=True), role("rollout-0", once, kind="rollout", worker_id="w")) is None
    assert [event for event, _ in run.events] == [Event.ROLE_DRAINED, Event.ROLE_RESTARTED]


@pytest.mark.parametrize(
    ("elsewhere", "over"), [({"rollout-9": "rollout"}, False), ({}, True)], ids=["another worker is left", "the run is over"]
)
def test_a_worker_that_drains_stays_away_if_others_are_left_or_the_run_is_over(
    tmp_path: Path, elsewhere: Mapping[str, str], over: bool
) -> None:
    code = starts(tmp_path / "n", "pass")
    leases = KnownLeases(lambda started: LeaseView(started, {}, elsewhere, answered_at=time.monotonic(), is_over=over))
    run = Run(tmp_path, floors={"rollout": 1}, leases=leases)
    leader = "import time; time.sleep(0.5)"
    assert run.see(role("trainer", leader, leads=True), role("rollout-0", code, kind="rollout", worker_id="w")) is None
    assert (tmp_path / "n").read_text() == "x"
    assert [event for event, _ in run.events] == ([] if over else [Event.ROLE_DRAINED])


def test_a_role_that_lives_without_a_lease_is_killed_and_started_again(tmp_path: Path) -> None:
    patience = Patience(poll_s=0.02, stop_s=0.5, ending_s=0.2, hang_s=2.0)
    hanging = starts(tmp_path / "n", "import time\nif number == 1: time.sleep(600)")

    def is_second() -> bool:
        return (tmp_path / "n").exists() and len((tmp_path / "n").read_text()) > 1

    leases = KnownLeases(lambda started: LeaseView(started, {"t": time.monotonic() if is_second() else started}, {}))
    run = Run(tmp_path, leases=leases, patience=patience)
    assert run.see(role("trainer", hanging, leads=True, worker_id="t")) is None
    (failure,) = run.named(Event.ROLE_FAILED)
    assert "held no lease for" in str(failure["reason"])
    assert leases.given_up == ["t"]


def test_nobody_hangs_while_the_server_is_away(tmp_path: Path) -> None:
    patience = Patience(poll_s=0.02, stop_s=0.5, ending_s=0.2, hang_s=0.05)
    leases = KnownLeases(lambda started: LeaseView(None, {"t": started}, {}))
    run = Run(tmp_path, leases=leases, patience=patience)
    assert run.see(role("trainer", "import time; time.sleep(0.5)", leads=True, worker_id="t")) is None
    assert run.events == []


def test_a_fenced_trainer_comes_back_when_the_other_one_is_gone(tmp_path: Path) -> None:
    fenced = starts(tmp_path / "n", "if number == 1: raise SystemExit(7)")
    other = {"trainer-by-hand": "trainer"}
    leases = KnownLeases(lambda started: LeaseView(started, {}, other if time.monotonic() < started + 0.5 else {}))
    started = time.monotonic()
    assert Run(tmp_path, leases=leases).see(role("trainer", fenced, leads=True)) is None
    assert time.monotonic() - started >= 0.5


def test_two_trainers_do_not_fence_each_other_for_ever(tmp_path: Path) -> None:
    leases = KnownLeases(lambda started: LeaseView(started, {}, {"trainer-by-hand": "trainer"}))
    patience = Patience(poll_s=0.02, stop_s=0.5, lease_s=0.1)
    with pytest.raises(RoleFailed, match=r"another trainer \(trainer-by-hand\) trains this run"):
        Run(tmp_path, leases=leases, patience=patience).see(role("trainer", "raise SystemExit(7)", leads=True))


def test_a_role_that_never_worked_is_not_tried_for_long(tmp_path: Path) -> None:
    broken = starts(tmp_path / "n", "raise SystemExit('error: no such reward function')")
    leases = KnownLeases(lambda started: LeaseView(started, {}, {}))
    policy = RestartPolicy(max_restarts=1000, backoff_s=0.01, max_backoff_s=0.01)
    with pytest.raises(RoleFailed, match=r"trainer failed 3 times.*no such reward function"):
        Run(tmp_path, leases=leases, policy=policy).see(role("trainer", broken, leads=True, worker_id="t"))
    assert (tmp_path / "n").read_text() == "xxx"


def test_a_stop_during_a_wait_for_a_restart_ends_the_run(tmp_path: Path) -> None:
    stop = StopRequest()
    policy = RestartPolicy(max_restarts=9, backoff_s=600, max_backoff_s=600)
    supervisor = Supervisor(
        lambda: [role("trainer", "import os; os.kill(os.getpid(), 9)", leads=True), role("rollout-0", FOREVER)],
        tmp_path,
        policy=policy,
        patience=Patience(poll_s=0.02, stop_s=0.5),
    )
    timer = threading.Timer(0.5, stop.receive, (15, None))
    timer.start()
    assert supervisor.run(stop) == 15
    timer.join()
    assert nothing_left()
