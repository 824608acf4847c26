"""Policy versions of tokens, run-length coded.

A span says: the sampled tokens `start .. end-1` of a trajectory were sampled by policy version `version`, and the oldest
version whose KV any of them attended to is `kv_version`. Tokens that were not sampled (prompt, tool output) are in no span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Half-open token range [start, end) sampled by `version`, over KV at least as new as `kv_version`."""

    start: int
    end: int
    version: int
    kv_version: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"VersionSpan start={self.start} end={self.end}: needs 0 <= start < end")
        if not 0 <= self.kv_version <= self.version:
            raise ValueError(
                f"VersionSpan kv_version={self.kv_version} version={self.version}: needs 0 <= kv_version <= version"
            )


def spans_from_tokens(positions: Sequence[int], versions: Sequence[int], kv_versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Run-length code one (position, version, kv_version) per sampled token; positions ascend strictly."""
    spans: list[VersionSpan] = []
    for position, version, kv_version in zip(positions, versions, kv_versions, strict=True):
        if spans:
            last = spans[-1]
            if position < last.end:
                raise ValueError(f"positions must ascend: {position} after {last.end - 1}")
            if position == last.end and (version, kv_version) == (last.version, last.kv_version):
                spans[-1] = VersionSpan(last.start, position + 1, version, kv_version)
                continue
        spans.append(VersionSpan(position, position + 1, version, kv_version))
    return tuple(spans)


def oldest_version(spans: Iterable[VersionSpan]) -> int | None:
    """Oldest version that a sampled token depends on (its own or its KV's); None without sampled tokens."""
    return min((span.kv_version for span in spans), default=None)
