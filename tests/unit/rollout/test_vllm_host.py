"""What surrounds vLLM and needs none: its arguments, its environment, shared memory, and the leash of its processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from async_rl.config.rollout import RolloutConfig, VllmConfig
from async_rl.errors import ConfigError
from async_rl.rollout.engines import make_engine
from async_rl.rollout.vllm_host import command_flags, engine_arguments, environment, one_digest, stop_kind
from async_rl.rollout.vllm_staging import StagingFile
from async_rl.testing.pushes import push_of
from async_rl.testing.tiny_models import make_tiny_model, save_tiny_model


def test_cpus_get_small_blocks_and_no_compiler_and_gpus_vllms_own() -> None:
    cpu = engine_arguments(Path("m"), RolloutConfig(max_running=7), 99)
    assert (cpu["block_size"], cpu["enforce_eager"], cpu["kv_cache_memory_bytes"]) == (32, True, 2**30)
    assert (cpu["max_num_seqs"], cpu["max_model_len"], cpu["logprobs_mode"]) == (7 + 32, 99, "processed_logprobs")
    gpu = engine_arguments(Path("m"), RolloutConfig(device="cuda"), 99)
    assert not {"block_size", "enforce_eager", "kv_cache_memory_bytes"} & gpu.keys()
    assert gpu["gpu_memory_utilization"] == 0.9


def test_the_users_own_arguments_win() -> None:
    config = RolloutConfig(vllm=VllmConfig(block_size=64, args={"block_size": 16, "max_num_batched_tokens": 4096}))
    arguments = engine_arguments(Path("m"), config, 99)
    assert (arguments["block_size"], arguments["max_num_batched_tokens"]) == (16, 4096)


def test_a_server_gets_the_same_arguments_as_flags() -> None:
    flags = command_flags({"model": "m", "enforce_eager": True, "x": False, "n_y": 3, "unset": None, "config": {"a": [1]}})
    assert flags == ["--model", "m", "--enforce-eager", "--no-x", "--n-y", "3", "--config", '{"a": [1]}']


def test_vllms_processes_know_who_started_them() -> None:
    assert environment(RolloutConfig(num_threads=3), 4711) | {"x": ""} == {
        **environment(RolloutConfig(num_threads=3), 1),
        "ASYNC_RL_VLLM_STARTER": "4711",
        "OMP_NUM_THREADS": "3",
        "x": "",
    }


@pytest.mark.parametrize(("reason", "is_stop"), [("stop", True), ("length", False)])
def test_an_end_is_a_stop_token_or_a_limit(reason: str, is_stop: bool) -> None:
    assert stop_kind(reason) is is_stop


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_any_other_end_is_no_answer(reason: str | None) -> None:
    with pytest.raises(ValueError, match=str(reason)):
        stop_kind(reason)


def test_a_tensor_that_ranks_read_differently_has_no_digest() -> None:
    assert one_digest([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2"}]) == {"a": "1", "b": "ranks differ"}


def test_staged_weights_are_read_by_another_mapping_also_when_their_name_is_gone(tmp_path: Path) -> None:
    staging = StagingFile(tmp_path)
    manifest, tensors = push_of(make_tiny_model(seed=1), 1)
    update = staging.write(manifest, tensors, {"alias": manifest.entries[0].name})
    mapped = torch.from_file(update["path"], shared=True, size=update["num_bytes"], dtype=torch.uint8)
    staging.mapped()
    assert list(tmp_path.iterdir()) == []
    manifest, tensors = push_of(make_tiny_model(seed=2), 2)
    again = staging.write(manifest, tensors, {"alias": manifest.entries[0].name})
    assert again == update
    for name, dtype, shape, offset in again["entries"]:
        expected = tensors[manifest.entries[0].name if name == "alias" else name]
        size = expected.numel() * expected.element_size()
        assert dtype == "float32"
        assert offset % 64 == 0
        assert torch.equal(mapped[offset : offset + size].view(torch.float32).view(shape), expected)
    staging.close()


def test_another_layout_gets_another_file(tmp_path: Path) -> None:
    staging = StagingFile(tmp_path)
    paths = []
    for layers in (1, 2):
        manifest, tensors = push_of(make_tiny_model(num_hidden_layers=layers), layers)
        paths.append(staging.write(manifest, tensors, {})["path"])
    assert len(set(paths)) == 2
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_vllm_that_is_not_installed_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "async_rl.rollout.vllm_in_process", raising=False)
    path = save_tiny_model(tmp_path / "model", head_dim=32)
    with pytest.raises(ConfigError, match=r"async-rl\[vllm\]"):
        make_engine(path, RolloutConfig(engine="vllm"), "engine-0")


def test_heads_that_vllms_cpu_kernels_do_not_know_are_refused_before_anything_starts(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", head_dim=16)
    with pytest.raises(ConfigError, match="heads have 16 dimensions"):
        make_engine(path, RolloutConfig(engine="vllm"), "engine-0")


def test_a_worker_without_a_server_of_its_own_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", head_dim=32)
    config = RolloutConfig(engine="vllm-server", vllm=VllmConfig(servers=["http://a:1"]))
    with pytest.raises(ConfigError, match="worker 1 has no server"):
        make_engine(path, config, "engine-1", index=1)


LEASHED = """
import os, subprocess, sys
from async_rl.rollout.vllm_plugin import end_with_parent
if sys.argv[1] == "starter":
    os.environ["ASYNC_RL_VLLM_STARTER"] = str(os.getpid())
    end_with_parent()  # not for the one that starts
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "core", sys.argv[2]])
    sys.stdin.read()
else:
    end_with_parent()
    print(os.getpid(), os.getpgid(0), flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")
def test_a_process_of_vllm_ends_with_the_one_that_started_it() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", LEASHED, "starter", LEASHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid, group = starter.stdout.readline().split()
    assert pid == group  # a signal to the starter's group does not reach it
    starter.kill()
    starter.wait(10)
    assert starter.stdout.read() == ""  # the child held the other end of this pipe: it has ended
    starter.stdout.close()
    assert starter.stdin is not None
    starter.stdin.close()


ORPHANED = """
import ctypes, multiprocessing, os, signal, subprocess, sys
from async_rl.rollout.vllm_plugin import end_with_parent

def core():
    multiprocessing.parent_process().join()
    end_with_parent()

if __name__ == "__main__" and sys.argv[1] == "starter":
    os.environ["ASYNC_RL_VLLM_STARTER"] = str(os.getpid())
    process = multiprocessing.get_context("spawn").Process(target=core)
    process.start()
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
elif __name__ == "__main__":
    PR_SET_CHILD_SUBREAPER = 36  # as service managers have it: orphans are this one's children, not the first process's
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with subprocess.Popen([sys.executable, __file__, "starter"], stdout=subprocess.PIPE, text=True) as starter:
        core_pid = int(starter.stdout.readline())
        starter.wait()
        print(os.waitstatus_to_exitcode(os.waitpid(core_pid, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")
def test_a_process_of_vllm_whose_starter_died_while_it_was_imported_ends_too(tmp_path: Path) -> None:
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED)
    run = subprocess.run([sys.executable, str(script), "reaper"], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == f"{-signal.SIGKILL}\n", run.stderr
