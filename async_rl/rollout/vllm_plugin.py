"""vLLM's own hook (entry point `vllm.general_plugins`): runs in each of its processes before anything else of ours.

It registers our weight-transfer backend, and ties each process to its parent's life, so that nothing of an engine that a
rollout worker started outlives it, whatever dies: worker → engine core → ranks. Signals to the worker's process group, which
ask it to drain, do not reach them: they are needed for that.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

from async_rl.rollout.vllm_host import BACKEND, LEASH_VARIABLE

PR_SET_PDEATHSIG = 1


def register() -> None:
    """May be called again."""
    end_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "async_rl.rollout.vllm_worker", "StagedWeights")


def end_with_parent() -> None:
    """Leave the parent's process group, and ask the kernel for SIGKILL at its death; in every process but the one that started
    vLLM (Linux)."""
    starter = os.environ.get(LEASH_VARIABLE)
    if starter is None or int(starter) == os.getpid() or sys.platform != "linux":
        return
    if os.getsid(0) != os.getpid():  # the leader of a session is alone in its group
        os.setpgid(0, 0)
    parent, started_by = os.getppid(), multiprocessing.parent_process()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have died before the request was made: importing vLLM takes seconds. Orphans are not always the first process's.
    if os.getppid() != parent or parent == 1 or (started_by is not None and not started_by.is_alive()):
        os.kill(os.getpid(), signal.SIGKILL)
