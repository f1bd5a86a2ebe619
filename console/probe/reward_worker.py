"""Measures how fast one reward worker of a run scores, called as its reward service calls it: a child process.

The samples are scored again and again, in batches as large and as many at once as the run allows. What a batch has
scored counts once it is answered; a first sample, with which is loaded what is loaded late, does not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from console.config.reward_settings import own_security
from console.probe.reward_samples import Measurable, read_measurable, reward_name
from console.probe.worker import Worker
from penstock.config import ConfigError
from penstock.errors import PenstockError
from penstock.rewards import RewardLoadError, RewardModel
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.v1 import reward_pb2, types_pb2
from services.reward.models.build import build_model
from services.reward.models.by_source import ModelsBySource, distinct_rewards

_MAX_UNSCORED = 0.2
"""Share of samples without a score above which a rate says nothing."""


def main() -> None:
    """Measure as the settings say; what cannot be measured is said in the last line of standard error."""
    worker = Worker()
    os.chdir(worker.settings["cwd"])
    recording = worker.settings["recording"]
    try:
        found = read_measurable(Path(worker.settings["run"]), None if recording is None else Path(recording))
        asyncio.run(_measure(worker, found))
    except (ConfigError, PenstockError, RewardLoadError) as error:
        raise SystemExit(str(error)) from error


async def _measure(worker: Worker, found: Measurable) -> None:
    settings = found.settings
    rewards, by_source = distinct_rewards(settings.reward, settings.sources)
    judges = Security.from_environment(JUDGES)
    models: list[RewardModel] = []
    try:
        for each in rewards:
            models.append(build_model(each, judges=judges, security=own_security(each)))
        model = ModelsBySource(models, by_source)
        await model.check()
        await model.probe()
        described = await model.describe()
        batch = min(settings.reward.max_batch_size, described.max_batch_size or settings.reward.max_batch_size)
        measurement = _Measurement(worker, found, model, batch=batch)
        await measurement.run(worker.settings["seconds"])
    finally:
        await asyncio.gather(*(each.close() for each in models))


class _Measurement:
    def __init__(self, worker: Worker, found: Measurable, model: ModelsBySource, *, batch: int) -> None:
        self._worker, self._found, self._model, self._batch = worker, found, model, batch
        self._statuses: Counter[int] = Counter()
        self._why = ""
        """Why the first sample without a score has none."""

    async def run(self, seconds: float) -> None:
        """Score for `seconds`, then finish what is under way; reports the rate meanwhile."""
        batches = self._batches()
        await self._score(self._found.items[:1])
        self._statuses.clear()
        begin_s = time.perf_counter()

        async def work() -> None:
            while time.perf_counter() - begin_s < seconds:
                await self._score(next(batches))
                self._tell(time.perf_counter() - begin_s)

        await asyncio.gather(*(work() for _ in range(self._found.settings.reward.max_concurrent_batches)))
        if self._unscored_share() > _MAX_UNSCORED:
            raise RewardLoadError(
                f"{self._unscored_share():.0%} of {self._statuses.total()} samples got no score ({self._why}); see "
                "penstock reward check"
            )

    def _batches(self) -> Iterator[Sequence[reward_pb2.ScoreItem]]:
        items = itertools.cycle(self._found.items)
        while True:
            yield list(itertools.islice(items, self._batch))

    async def _score(self, items: Sequence[reward_pb2.ScoreItem]) -> None:
        scores = await self._model.score(items, timeout_s=self._found.settings.reward.timeout_s)
        for score in scores:
            self._statuses[score.status] += 1
            if score.status != types_pb2.SCORE_STATUS_OK and not self._why:
                self._why = f"{types_pb2.ScoreStatus.Name(score.status)}: {score.message}"

    def _unscored_share(self) -> float:
        total = self._statuses.total()
        return 1 - self._statuses[types_pb2.SCORE_STATUS_OK] / total

    def _tell(self, took_s: float) -> None:
        if self._unscored_share() > _MAX_UNSCORED:
            return
        kilobytes = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        self._worker.tell(
            model=reward_name(self._found.settings),
            samples_per_second=self._statuses.total() / took_s,
            num_samples=self._statuses.total(),
            completions="recorded" if self._found.are_recorded else "answers",
            memory_GB=kilobytes * 1024 / 1e9,
        )


if __name__ == "__main__":
    main()
