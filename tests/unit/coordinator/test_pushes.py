"""Push decisions, and what the supervisor does with them."""

from __future__ import annotations

from dataclasses import replace

from async_rl.coordinator.pushes import FORGET_S, Complete, Evict, Freeze, PushSupervisor, decide
from async_rl.registry.memory_registry import MemoryRegistry
from async_rl.registry.versions import (
    Announcement,
    EngineRecord,
    EngineStatus,
    ProofReport,
    PushPlan,
    PushStatus,
    RegistryState,
)

PROOF = ProofReport(0.0, 0.0, 1)
ALIVE = frozenset({"w-a", "w-b", "w-c"})
T0 = 1000.0


def engine(name: str, serves: int | None = None, *, epoch: int = 1, fenced: bool = False) -> EngineRecord:
    status = EngineStatus.FENCED if fenced else EngineStatus.JOINING if serves is None else EngineStatus.SERVING
    return EngineRecord(name, f"w-{name}", status, serves, epoch if serves is not None else 0)


def plan(version: int, *engines: str, generation: int = 1, status: PushStatus = PushStatus.PLANNED) -> PushPlan:
    return PushPlan(1, version, generation, engines, "h:1", deadline_s=30.0, planned_at_s=T0, status=status)


def state(
    pushable: int | None,
    *engines: EngineRecord,
    plan: PushPlan | None = None,
    confirmed: str = "",
    failed: str = "",
    ready: str = "",
) -> RegistryState:
    return RegistryState(
        revision=1,
        epoch=1,
        announced_version=pushable,
        pushable_version=pushable,
        store_address="h:1",
        trained_through={},
        discarded=0,
        engines={record.engine_id: record for record in engines},
        plan=plan,
        confirmed=dict.fromkeys(confirmed, PROOF),
        failed=dict.fromkeys(failed, "no"),
        ready=frozenset(ready),
    )


def after(s: RegistryState, seconds: float, alive: frozenset[str] = ALIVE) -> tuple[object, ...]:
    return decide(s, alive, T0 + seconds, deadline_s=30.0)


def test_nothing_is_pushed_without_a_version_or_without_an_engine() -> None:
    assert after(state(None, engine("a")), 0) == ()
    assert after(state(3), 0) == ()
    assert after(state(3, engine("a", fenced=True)), 0) == ()


def test_the_first_push_names_every_living_engine_that_wants_weights() -> None:
    s = state(3, engine("b"), engine("a"), engine("c", fenced=True), engine("d"))
    assert after(s, 5) == (
        Evict(("d",), "its worker's lease ran out"),
        Freeze(PushPlan(1, 3, 1, ("a", "b"), "h:1", 30.0, T0 + 5)),
    )


def test_the_group_lives_from_push_to_push_and_a_change_of_membership_makes_a_new_one() -> None:
    done = plan(3, "a", "b", generation=4, status=PushStatus.LIVE)
    (same,) = after(state(4, engine("a", 3), engine("b", 3), plan=done), 1)
    assert isinstance(same, Freeze)
    assert (same.plan.version, same.plan.generation) == (4, 4)
    (fewer,) = after(state(4, engine("a", 3), engine("b", fenced=True), plan=done), 1)
    assert isinstance(fewer, Freeze)
    assert (fewer.plan.participants, fewer.plan.generation) == (("a",), 5)
    (rejoined,) = after(state(4, engine("a", 3), engine("b"), plan=done), 1)
    assert isinstance(rejoined, Freeze)
    assert rejoined.plan.generation == 5  # the engine that joined anew has no group


def test_a_joiner_gets_a_repair_push_of_the_newest_version_in_a_new_group() -> None:
    s = state(3, engine("a", 3), engine("b"), plan=plan(3, "a", status=PushStatus.LIVE))
    assert after(s, 7) == (Freeze(PushPlan(1, 3, 2, ("a", "b"), "h:1", 30.0, T0 + 7)),)


def test_a_restarted_trainer_pushes_the_same_version_under_its_own_epoch() -> None:
    s = replace(state(3, engine("a", 3), plan=plan(3, "a", status=PushStatus.LIVE)), epoch=2, store_address="h:2")
    assert after(s, 7) == (Freeze(PushPlan(2, 3, 2, ("a",), "h:2", 30.0, T0 + 7)),)


def test_a_newer_version_waits_until_the_running_push_has_ended() -> None:
    running = plan(3, "a", "b")
    assert after(state(5, engine("a", 2), engine("b", 2), plan=running, ready="ab"), 9) == ()
    s = state(5, engine("a", 3), engine("b", 3), plan=running, ready="ab", confirmed="ab")
    assert after(s, 9) == (Complete(running, PushStatus.LIVE),)
    ended = replace(s, plan=replace(running, status=PushStatus.LIVE))
    (begun,) = after(ended, 9)
    assert isinstance(begun, Freeze)
    assert begun.plan.version == 5


def test_a_push_that_everybody_failed_is_failed() -> None:
    running = plan(3, "a", "b")
    s = state(3, engine("a", fenced=True), engine("b", fenced=True), plan=running, ready="ab", failed="ab")
    assert after(s, 1) == (Complete(running, PushStatus.FAILED),)


def test_who_is_late_is_evicted_at_the_deadline_and_not_before() -> None:
    running = plan(3, "a", "b")
    s = state(3, engine("a", 3), engine("b", 2), plan=running, ready="ab", confirmed="a")
    assert after(s, 29.9) == ()
    evict, complete = after(s, 30)
    assert isinstance(evict, Evict)
    assert evict.engine_ids == ("b",)
    assert "30.0 s" in evict.reason
    assert complete == Complete(running, PushStatus.LIVE)


def test_who_is_not_ready_within_a_third_of_the_deadline_is_evicted_and_the_others_start_again() -> None:
    s = state(3, engine("a", 2), engine("b", 2), plan=plan(3, "a", "b"), ready="a")
    assert after(s, 9.9) == ()
    evict, freeze = after(s, 10)
    assert isinstance(evict, Evict)
    assert evict.engine_ids == ("b",)
    assert freeze == Freeze(PushPlan(1, 3, 2, ("a",), "h:1", 20.0, T0 + 10))  # the deadline does not start again


def test_a_dead_engine_is_not_waited_for() -> None:
    alive = frozenset({"w-a"})
    s = state(3, engine("a", 2), engine("b", 2), plan=plan(3, "a", "b"), ready="a")
    assert after(s, 2, alive) == (
        Evict(("b",), "its worker's lease ran out"),
        Freeze(PushPlan(1, 3, 2, ("a",), "h:1", 28.0, T0 + 2)),
    )
    moving = state(3, engine("a", 3), engine("b", 2), plan=plan(3, "a", "b"), ready="ab", confirmed="a")
    assert after(moving, 2, alive) == (
        Evict(("b",), "its worker's lease ran out"),
        Complete(plan(3, "a", "b"), PushStatus.LIVE),
    )


def test_an_engine_that_refuses_the_manifest_does_not_hold_up_the_others() -> None:
    s = state(3, engine("a", 2), engine("b", fenced=True), plan=plan(3, "a", "b"), ready="a", failed="b")
    assert after(s, 1) == (Freeze(PushPlan(1, 3, 2, ("a",), "h:1", 29.0, T0 + 1)),)


def test_a_broken_push_is_planned_again_with_those_who_lack_it_and_those_who_help() -> None:
    broken = plan(3, "a", "b", status=PushStatus.BROKEN)
    s = state(3, engine("a", 3), engine("b", 2), plan=broken, ready="ab", confirmed="a")
    assert after(s, 10) == (Freeze(PushPlan(1, 3, 2, ("a", "b"), "h:1", 20.0, T0 + 10)),)
    assert after(s, 10, frozenset({"w-a"}))[-1] == Complete(broken, PushStatus.LIVE)
    evict, complete = after(s, 30)
    assert isinstance(evict, Evict)
    assert evict.engine_ids == ("b",)
    assert complete == Complete(broken, PushStatus.LIVE)


def test_a_broken_push_gives_way_to_a_newer_version_with_a_deadline_of_its_own() -> None:
    s = state(4, engine("a", 2), plan=plan(3, "a", status=PushStatus.BROKEN))
    assert after(s, 10) == (Freeze(PushPlan(1, 4, 2, ("a",), "h:1", 30.0, T0 + 10)),)


async def test_the_supervisor_takes_a_push_from_announcement_to_live() -> None:
    registry = MemoryRegistry(lambda: 1)

    async def alive() -> frozenset[str]:
        return frozenset({"w-a"})

    supervisor = PushSupervisor(registry, alive, deadline_s=30.0, clock=lambda: T0)
    await registry.join("a", "w-a")
    await registry.announce(Announcement(1, 0, 0, 0, b"m", "h:1"))
    assert await supervisor.act(await registry.state())
    planned = (await registry.state()).plan
    assert planned == PushPlan(1, 0, 1, ("a",), "h:1", 30.0, T0)
    assert not await supervisor.act(await registry.state())
    assert await registry.ready("a", planned)
    assert await registry.confirm("a", 1, 0, PROOF)
    assert await supervisor.act(await registry.state())
    finished = (await registry.state()).finished
    assert finished is not None
    assert finished.plan.status is PushStatus.LIVE
    assert not await supervisor.act(await registry.state())


async def test_fenced_engines_of_workers_that_are_gone_are_forgotten_after_a_while() -> None:
    registry = MemoryRegistry(lambda: 1)
    now = T0

    async def alive() -> frozenset[str]:
        return frozenset({"w-lives"})

    supervisor = PushSupervisor(registry, alive, deadline_s=30.0, clock=lambda: now)
    for name in ("dead", "lives"):
        await registry.join(name, f"w-{name}")
    await registry.evict(["dead", "lives"], "hung")
    await supervisor.act(await registry.state())
    now = T0 + FORGET_S - 1
    await supervisor.act(await registry.state())
    assert (await registry.state()).engines.keys() == {"dead", "lives"}
    now = T0 + FORGET_S
    assert await supervisor.act(await registry.state())
    assert (await registry.state()).engines.keys() == {"lives"}
