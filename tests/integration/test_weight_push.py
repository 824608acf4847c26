"""Weight pushes between real processes: a publisher and a coordinator here, engines that die, hang, lie or join late there."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from async_rl.config.trainer import WeightsConfig
from async_rl.errors import EpochFenced
from async_rl.registry.versions import EngineStatus, min_served
from async_rl.run_dir.segments_of_run import segments_of_run
from async_rl.testing.push_engines import served_path, withdrawn_path
from async_rl.testing.push_run import START_S, PushRun, serving
from async_rl.testing.push_targets import TinyPolicy


@pytest.fixture
async def run(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PushRun]:
    settings = {"bucket_bytes": 2**16, "deadline_s": 30.0, "probe_tolerance": 1e-4, **getattr(request, "param", {})}
    running = PushRun(tmp_path, WeightsConfig(**settings))
    await running.start()
    yield running
    await running.stop()


def assert_equal_after_cast(held: dict[str, torch.Tensor], model: TinyPolicy, wire: torch.dtype) -> None:
    sent = model.state_dict()
    assert held.keys() == sent.keys()
    for name, tensor in sent.items():
        expected = tensor.to(wire).to(held[name].dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(held[name], expected), name


@pytest.mark.parametrize(
    "run",
    [{"backend": "gloo", "wire_dtype": "bfloat16"}, {"backend": "shm", "wire_dtype": "bfloat16"}, {"backend": "disk"}],
    ids=["gloo", "shm", "disk"],
    indirect=True,
)
async def test_two_engines_hold_what_was_sent_push_after_push_and_a_late_one_joins(run: PushRun) -> None:
    run.engine("a")
    run.engine("b", tied=False)
    await run.joined("a", "b")
    publisher = await run.publisher(1)
    wire = getattr(torch, run.weights.wire_dtype)
    for version in range(1, 5):
        model = TinyPolicy(version)
        model.steps += version  # a buffer that training changes
        await run.submit(publisher, version, model)
        state = await run.serves(version, "a", "b")
        assert_equal_after_cast(run.held("a", version), model, wire)
        assert_equal_after_cast(run.held("b", version), model, wire)
    assert await publisher.drain(timeout_s=5)
    assert min_served(state, await run.alive()) == 4
    assert [(s.version, s.live, s.engines) for s in run.stats] == [(v, True, ("a", "b")) for v in range(1, 5)]
    assert {s.generation for s in run.stats} == {run.stats[0].generation}
    assert all(s.parity_max_abs is not None and s.parity_max_abs <= 1e-5 and s.parity_tokens == 2 * 6 for s in run.stats)

    run.engine("c")
    state = await run.serves(4, "c", timeout_s=START_S)
    assert_equal_after_cast(run.held("c", 4), model, wire)
    assert state.plan is not None
    assert state.plan.participants == ("a", "b", "c")
    assert state.plan.generation > run.stats[0].generation
    assert serving(state, "a") == serving(state, "b") == 4
    assert not withdrawn_path(run.directory, "a").exists()
    segments = segments_of_run(run.weights.shm_dir, run.run_id)
    assert len(segments) == (2 if run.weights.backend == "shm" else 0)  # one that is sent, one that is filled
    if run.weights.backend == "disk":
        assert [path.name for path in sorted((run.directory / "weights").iterdir())] == ["v00000003-e1", "v00000004-e1"]


@pytest.mark.parametrize("run", [{"deadline_s": 6.0}], indirect=True)
@pytest.mark.parametrize(("fault", "lease_outlives_process"), [("SIGKILL", False), ("SIGKILL", True), ("SIGSTOP", True)])
async def test_an_engine_that_dies_or_hangs_in_a_push_costs_less_than_the_deadline(
    run: PushRun, fault: str, lease_outlives_process: bool
) -> None:
    run.lease_outlives_process = lease_outlives_process
    run.engine("a")
    run.engine("b")
    run.engine("doomed", fault=fault, at_version=2)
    await run.joined("a", "b", "doomed")
    publisher = await run.publisher(1)
    await run.submit(publisher, 1, TinyPolicy(1))
    await run.serves(1, "a", "b", "doomed")
    model = TinyPolicy(2)
    started = time.monotonic()
    await run.submit(publisher, 2, model)
    assert time.monotonic() - started < 0.5  # training goes on
    state = await run.serves(2, "a", "b", timeout_s=8)
    assert await publisher.drain(timeout_s=max(0.1, started + 7 - time.monotonic()))
    assert_equal_after_cast(run.held("a", 2), model, torch.float32)
    assert_equal_after_cast(run.held("b", 2), model, torch.float32)
    state = await run.until(lambda s: s.engines["doomed"].status is EngineStatus.FENCED, 8)
    assert min_served(state, frozenset({"w-a", "w-b", "w-doomed"})) == 2
    assert not served_path(run.directory, "doomed", 2).exists()
    assert not withdrawn_path(run.directory, "a").exists()
    assert run.stats[-1].version == 2
    assert run.stats[-1].live
    await run.submit(publisher, 3, TinyPolicy(3))
    started = time.monotonic()
    await run.serves(3, "a", "b")
    assert time.monotonic() - started < 5  # the dead one is not waited for again


@pytest.mark.parametrize("run", [{"deadline_s": 6.0}], indirect=True)  # a repair push may be under way at the end
@pytest.mark.parametrize(("fault", "reason"), [("flip", "mix.weight"), ("stale_head", "nats (max; most at probe token")])
async def test_an_engine_whose_proof_fails_does_not_serve_and_says_so(run: PushRun, fault: str, reason: str) -> None:
    run.engine("good")
    run.engine("liar", fault=fault, at_version=2)
    await run.joined("good", "liar")
    publisher = await run.publisher(1)
    await run.submit(publisher, 1, TinyPolicy(1))
    await run.serves(1, "good", "liar")
    await run.submit(publisher, 2, TinyPolicy(2))
    await run.serves(2, "good")
    await run.until(lambda s: s.finished is not None and s.finished.plan.version == 2, 10)
    assert await publisher.drain(timeout_s=5)
    push = next(stats for stats in run.stats if stats.version == 2 and stats.engines)  # a slow machine may need two plans
    assert push.engines == ("good",)
    assert any(reason in stats.failed.get("liar", "") for stats in run.stats)
    assert reason in withdrawn_path(run.directory, "liar").read_text()
    assert not served_path(run.directory, "liar", 2).exists()


async def test_a_restarted_trainer_pushes_again_and_the_old_one_is_refused(run: PushRun) -> None:
    run.engine("a")
    await run.joined("a")
    old = await run.publisher(1)
    await run.submit(old, 3, TinyPolicy(3))
    await run.serves(3, "a")
    new = await run.publisher(2)
    await run.submit(new, 3, TinyPolicy(3))
    state = await run.until(lambda s: s.engines["a"].serving_epoch == 2, 10)
    assert serving(state, "a") == 3
    with pytest.raises(EpochFenced):
        await old.announce(4, trained_through=64, discarded=0)
    assert not withdrawn_path(run.directory, "a").exists()


async def test_a_new_trainer_that_starts_below_what_is_served_is_refused_loudly(run: PushRun) -> None:
    run.engine("a")
    await run.joined("a")
    first = await run.publisher(1)
    await run.submit(first, 3, TinyPolicy(3))
    await run.serves(3, "a")
    forked = await run.publisher(2)
    await run.submit(forked, 2, TinyPolicy(2))
    assert await forked.drain(timeout_s=10)
    assert not run.stats[-1].live
    assert "never goes back" in run.stats[-1].failed["a"]
    await run.submit(forked, 3, TinyPolicy(3))  # it came back to where the engines are
    await run.until(lambda s: (s.engines["a"].serving_epoch, s.engines["a"].serving_version) == (2, 3), 10)


async def test_the_newest_of_many_submitted_versions_arrives_and_superseded_ones_are_skipped(run: PushRun) -> None:
    run.engine("a")
    await run.joined("a")
    publisher = await run.publisher(1)
    for version in range(1, 30):
        await run.submit(publisher, version, TinyPolicy(version))
    await run.serves(29, "a")
    assert await publisher.drain(timeout_s=5)
    pushed = [stats.version for stats in run.stats]
    assert pushed == sorted(pushed)
    assert len(pushed) < 29
    assert_equal_after_cast(run.held("a", 29), TinyPolicy(29), torch.float32)
