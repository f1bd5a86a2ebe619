"""A taskset of verifiers: three sums."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ToyTaskset"]


class ToyData(vf.TaskData):
    answer: str


class ToyTask(vf.Task[ToyData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class ToyTaskset(vf.Taskset[ToyTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ToyTask]:
        for i in range(3):
            yield ToyTask(ToyData(prompt=f"{i}+1?", answer=str(i + 1)), self.config.task)
