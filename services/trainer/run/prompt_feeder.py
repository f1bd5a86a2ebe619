"""Sends prompts to the broker, and keeps exactly as many training groups in flight as the run needs.

Promises:

- A prompt is sent again until the broker has it; group names make that safe.
- When the broker's queue is full, the sender waits and probes for space with one prompt at a time, and the data stays
  unread: memory does not grow.
- At most `num_steps * groups_per_step` training groups are submitted, plus one for each group that was dropped, so that
  a finished run leaves nothing in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import structlog

from penstock.clients.broker import BrokerClient
from penstock.clients.prompts import submit_all
from penstock.process.tasks import set_within
from penstock.v1 import types_pb2
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.data.prompt_mixture import PassedGroup, PromptMixture
from services.trainer.data.prompt_order import (
    build_prompt,
    sampling_seed,
    training_group_id,
    training_position,
)
from services.trainer.run.context import RunContext

SUBMIT_BATCH_GROUPS = 64
CHECK_DROPPED_S = 0.2
"""Drops come in bursts: this long after the first one, they are counted and replaced together."""
CHECK_LOST_S = 15.0
"""A Redis that came back without its last second has lost prompts without reporting drops: check periodically."""

_log = structlog.get_logger()


class PromptSubmitter:
    """Submits prompts to the broker, which queues training and evaluation apart: neither call waits for the other."""

    def __init__(self, client: BrokerClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    async def submit(self, prompts: Sequence[types_pb2.Prompt]) -> None:
        """Returns once the broker has all of them; raises RefusedError if it refuses one for good."""
        await submit_all(partial(self._client.submit_prompts, self._run_id), prompts)


class PromptFeeder:
    """Submits training groups ahead of the trainer, as far as the broker's queue has space.

    Where the order depends on the steps taken, prompts are chosen at most `max_staleness` + 2 steps ahead, and before
    the next step counts: which ones follows from the steps alone, not from how fast the queue empties.
    """

    def __init__(
        self,
        *,
        context: RunContext,
        submitter: PromptSubmitter,
        mixture: PromptMixture,
        check_lost_s: float = CHECK_LOST_S,
    ) -> None:
        self._context = context
        self._check_lost_s = check_lost_s
        self._progress = context.progress
        self._submitter = submitter
        self._mixture = mixture
        self._waiting: deque[int] = deque()
        """Positions that are chosen and not submitted."""
        self._num_dropped_samples = 0
        self._has_drops = False
        self.accuracies: dict[str, float] = {}
        """Held-out accuracy by source, for the next step to count."""
        self._is_news = asyncio.Event()
        """Groups were dropped, or prompts of another step may be chosen."""

    def note_dropped_samples(self, num_samples: int) -> None:
        """The broker's counters show `num_samples` dropped samples in all; new ones may call for replacement groups."""
        if num_samples > self._num_dropped_samples:
            self._num_dropped_samples = num_samples
            self._has_drops = True
            self._is_news.set()

    def note_step(self, groups: Iterable[Sequence[TrainingSample]]) -> None:
        """Call once for each optimiser step, with its groups, when the progress has counted it."""
        data = self._context.config.data
        if not data.order_depends_on_steps:
            return
        while self._mixture.position < self._num_wanted(self._progress.policy_version - 1):
            self._choose()
        self._mixture.note_step(_passed(groups, data.pass_reward), self.accuracies)
        self.accuracies = {}
        self._is_news.set()

    def metrics(self) -> dict[str, float]:
        """Where the order of prompts is, for a step's line."""
        return self._mixture.metrics()

    async def run(self) -> None:
        """Submit until cancelled by the run."""
        try:
            await self._submit_all()
        finally:
            self._mixture.close()

    async def _submit_all(self) -> None:
        self._waiting.extend(training_position(group_id) for group_id in self._progress.outstanding)
        while True:
            await self._submit_wanted()
            is_news = await set_within(self._is_news, self._check_lost_s)
            self._is_news.clear()
            if self._has_drops or not is_news:
                await asyncio.sleep(CHECK_DROPPED_S)
                self._has_drops = False
                await self._count_dropped_groups()

    def _num_wanted(self, policy_version: int) -> int:
        """How many prompts may be chosen, in all, once the trainer has this version."""
        config = self._context.config
        num_steps = config.run.num_steps
        if config.data.order_depends_on_steps:
            num_steps = min(num_steps, policy_version + config.algorithm.max_staleness + 2)
        return num_steps * config.algorithm.prompts_per_step + self._progress.num_dropped_groups

    def _choose(self) -> None:
        position = self._mixture.take()
        self._progress.position = self._mixture.position
        self._progress.outstanding[training_group_id(position)] = None
        self._waiting.append(position)

    async def _submit_wanted(self) -> None:
        while True:
            wanted = self._num_wanted(self._progress.policy_version)
            while len(self._waiting) < SUBMIT_BATCH_GROUPS and self._mixture.position < wanted:
                self._choose()
            if not self._waiting:
                return
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), SUBMIT_BATCH_GROUPS))]
            for prompts, rows in self._mixture.to_draw(batch):
                await asyncio.to_thread(prompts.load, rows)
            await self._submitter.submit([self._prompt(position) for position in batch])

    async def _count_dropped_groups(self) -> None:
        """The broker drops groups sample by sample; how many whole groups are gone follows from what is left."""
        async with self._context.version_lock:
            response = await self._context.open_run(self._progress.acked_version)
            num_submitted = self._mixture.position - len(self._waiting)
            num_gone = num_submitted - self._progress.num_trained_groups - response.num_groups_in_flight
        if num_gone > self._progress.num_dropped_groups:
            _log.info("groups were dropped and are replaced", num_dropped_groups=num_gone)
            self._progress.num_dropped_groups = num_gone

    def _prompt(self, position: int) -> types_pb2.Prompt:
        source, prompt, tag = self._mixture.at(position)
        return build_prompt(
            prompt,
            group_id=training_group_id(position),
            group_size=source.group_size,
            sampling=types_pb2.SamplingParams(
                temperature=self._context.config.sampling.temperature,
                max_new_tokens=source.max_new_tokens,
                seed=sampling_seed(self._context.config.run.seed, position),
            ),
            purpose=types_pb2.PURPOSE_TRAIN,
            tag=tag,
        )


def _passed(groups: Iterable[Sequence[TrainingSample]], pass_reward: float) -> list[PassedGroup]:
    """Of each group with a tag, the share of its samples with that reward or more."""
    return [
        PassedGroup(tag, sum((sample.reward or 0.0) >= pass_reward for sample in samples) / len(samples))
        for samples in groups
        if samples and (tag := samples[0].tag) is not None
    ]
