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
from collections.abc import Sequence
from functools import partial

import structlog

from penstock.clients.broker import BrokerClient
from penstock.clients.prompts import submit_all
from penstock.process.tasks import set_within
from penstock.v1 import types_pb2
from services.trainer.data.prompt_order import (
    EncodedPrompt,
    PromptStream,
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
    """Submits prompts to the broker; calls take turns, so that a batch of evaluation prompts is not starved."""

    def __init__(self, client: BrokerClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._turn = asyncio.Lock()

    async def submit(self, prompts: Sequence[types_pb2.Prompt]) -> None:
        """Returns once the broker has all of them; raises RefusedError if it refuses one for good."""
        async with self._turn:
            await submit_all(partial(self._client.submit_prompts, self._run_id), prompts)


class PromptFeeder:
    """Submits training groups ahead of the trainer, as far as the broker's queue has space."""

    def __init__(
        self,
        *,
        context: RunContext,
        submitter: PromptSubmitter,
        stream: PromptStream,
        check_lost_s: float = CHECK_LOST_S,
    ) -> None:
        self._context = context
        self._check_lost_s = check_lost_s
        self._progress = context.progress
        self._submitter = submitter
        self._stream = stream
        self._num_dropped_samples = 0
        self._is_drop_news = asyncio.Event()

    def note_dropped_samples(self, num_samples: int) -> None:
        """The broker's counters show `num_samples` dropped samples in all; new ones may call for replacement groups."""
        if num_samples > self._num_dropped_samples:
            self._num_dropped_samples = num_samples
            self._is_drop_news.set()

    async def run(self) -> None:
        """Submit until cancelled by the run."""
        left_over = list(self._progress.outstanding)
        for start in range(0, len(left_over), SUBMIT_BATCH_GROUPS):
            part = left_over[start : start + SUBMIT_BATCH_GROUPS]
            await self._submitter.submit([self._prompt(training_position(group_id)) for group_id in part])
        while True:
            while (num_missing := self._num_wanted() - self._stream.position) > 0:
                await self._submit_next(min(num_missing, SUBMIT_BATCH_GROUPS))
            await set_within(self._is_drop_news, self._check_lost_s)
            await asyncio.sleep(CHECK_DROPPED_S)
            self._is_drop_news.clear()
            await self._count_dropped_groups()

    def _num_wanted(self) -> int:
        steps = self._context.config.run.num_steps * self._context.config.algorithm.prompts_per_step
        return steps + self._progress.num_dropped_groups

    async def _submit_next(self, num_groups: int) -> None:
        positions = [self._stream.take()[0] for _ in range(num_groups)]
        self._progress.position = self._stream.position
        self._progress.outstanding.update((training_group_id(position), None) for position in positions)
        await self._submitter.submit([self._prompt(position) for position in positions])

    async def _count_dropped_groups(self) -> None:
        """The broker drops groups sample by sample; how many whole groups are gone follows from what is left."""
        async with self._context.version_lock:
            response = await self._context.open_run(self._progress.acked_version)
            num_gone = self._stream.position - self._progress.num_trained_groups - response.num_groups_in_flight
        if num_gone > self._progress.num_dropped_groups:
            _log.info("groups were dropped and are replaced", num_dropped_groups=num_gone)
            self._progress.num_dropped_groups = num_gone

    def _prompt(self, position: int) -> types_pb2.Prompt:
        sampling = self._context.config.sampling
        return build_prompt(
            self._stream.at(position),
            group_id=training_group_id(position),
            group_size=self._context.config.algorithm.group_size,
            sampling=types_pb2.SamplingParams(
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                seed=sampling_seed(self._context.config.run.seed, position),
            ),
            purpose=types_pb2.PURPOSE_TRAIN,
        )


def training_feeder(
    context: RunContext, submitter: PromptSubmitter, prompts: Sequence[EncodedPrompt]
) -> PromptFeeder | None:
    """The feeder of a run; None if others put its groups."""
    if not prompts:
        return None
    config = context.config
    stream = PromptStream(
        prompts, seed=config.run.seed, shuffle=config.data.shuffle, position=context.progress.position
    )
    return PromptFeeder(context=context, submitter=submitter, stream=stream)
