"""Reward functions as they are written for TRL: called with lists, one entry per completion."""

from __future__ import annotations

from typing import Any


def exact(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 for the answer of the row."""
    return [float(_text(completion).strip() == right) for completion, right in zip(completions, answer, strict=True)]


async def short(completions: list[Any], max_words: list[int | None], **kwargs: Any) -> list[float | None]:
    """Words above the row's bound, as a punishment; rows without one are not judged by it."""
    return [
        None if bound is None else -float(max(0, len(_text(completion).split()) - bound))
        for completion, bound in zip(completions, max_words, strict=True)
    ]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
