"""Mathematical answers: found in the completion, compared with the gold answer as values, not as text."""

from __future__ import annotations

from async_rl.environments.base import Episode
from async_rl.environments.verifiers.answers import find_answer
from async_rl.environments.verifiers.base import Score, gold_of
from async_rl.environments.verifiers.checks import CheckPool


class MathAnswer:
    r"""1 if the completion's answer equals the row's, else 0; invalid if that cannot be decided within `timeout_s`.

    gold: column with the right answer (a number, or text with or without LaTeX). strict: the answer is what `\boxed{…}` holds;
    else also what follows "Final answer:", and at last the last number. The comparison runs in `processes` killable processes.
    """

    def __init__(self, *, gold: str = "answer", strict: bool = True, timeout_s: float = 5.0, processes: int = 2) -> None:
        self._gold, self._strict = gold, strict
        self._pool = CheckPool("math", processes=processes, timeout_s=timeout_s)

    async def verify(self, episode: Episode) -> Score:
        gold = _gold_answer(str(gold_of(episode, self._gold)))
        answer = find_answer(episode.completion, strict=self._strict)
        if answer is None:
            return 0.0
        return await self._pool.check({"gold": gold, "answer": answer})

    async def close(self) -> None:
        await self._pool.close()


def _gold_answer(text: str) -> str:
    r"""Gold answers come alone, in a box, or at the end of a solution (`#### 72`)."""
    if "\\boxed" in text or "\\fbox" in text or "####" in text:
        return find_answer(text, strict=False) or text
    return text
