"""A taskset of the library verifiers: tasks with weighted rewards, a metric and a stop condition."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Numeral(vf.TaskData):
    answer: str = ""


class NumeralTask(vf.Task[Numeral]):
    @vf.reward(weight=1.0)
    async def right(self, task: Numeral, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.reward(weight=0.1)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 8)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.stop
    async def rambles(self, trace: vf.Trace) -> bool:
        return len(trace.last_reply) > 200


class Numerals(vf.Taskset[NumeralTask, vf.TasksetConfig]):
    def load(self) -> Iterator[NumeralTask]:
        for number in range(100):
            yield NumeralTask(Numeral(prompt=f"Write {number} in binary.", answer=f"{number:b}"))
