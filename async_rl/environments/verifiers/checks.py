"""Checks of text that may take forever (algebra, regular expressions, schemas), in processes that are killed at a deadline."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.environments.processes import ProcessDied, ProcessHung, ProcessPool
from async_rl.errors import CodecError
from protocol.messages import Json, Reward
from protocol.packing import pack, unpack

TIMEOUT = "timeout"
CRASHED = "crash"
_GRACE_S = 5.0  # the deadline is kept in there; this is for a process that does not even keep that
_CHILD = "async_rl.environments.verifiers.check_child"


class CheckPool:
    """Answers checks of one kind (`check_child.CHECKS`) in `processes` processes, which start with the first check.

    timeout_s: of one check, from when a process is free for it.
    """

    def __init__(self, kind: str, *, processes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool = ProcessPool(
            _CHILD, pack({"kind": kind, "timeout_s": timeout_s}), what=f"the verifier {kind}", processes=processes
        )

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    async def check(self, fields: Mapping[str, Json]) -> float | Reward:
        """1 or 0; an invalid reward if the check took too long or its process died. Raises: ConfigError, CodecError."""
        try:
            return await self._pool.ask(pack(dict(fields)), _verdict, timeout_s=self._timeout_s + _GRACE_S)
        except ProcessHung as error:
            return Reward.invalid(str(error), TIMEOUT)
        except ProcessDied as error:
            return Reward.invalid(f"the checking process died: {error}", CRASHED)

    async def close(self) -> None:
        await self._pool.close()


def _verdict(body: bytes) -> float | Reward:
    fields = unpack(body)
    if not isinstance(fields, dict) or not ({"right"} == set(fields) or {"error", "type"} == set(fields)):
        raise CodecError("not a verdict")
    if "error" in fields:
        return Reward.invalid(str(fields["error"]), str(fields["type"]))
    return 1.0 if fields["right"] is True else 0.0
