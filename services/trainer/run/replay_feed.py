"""Copies the groups of trained steps that the broker retains into the replay buffer, while training continues.

Promises:
- After a restart the buffer holds what the broker retains: the trainer stores none of it.
- A step draws once everything it may draw from has arrived, so that a repeated step draws the same.
- A group that cannot be read is left out and logged; a feed that fell behind continues with what is still retained.
- Replaying changes no counter: a replayed group was trained and acknowledged once, and is neither leased nor
  acknowledged again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from penstock.clients.export import StepExport
from penstock.errors import InvalidFieldError, NotRetainedError
from penstock.v1 import broker_pb2
from services.trainer.batches.group_decoder import training_samples
from services.trainer.batches.replay_buffer import ReplayBuffer
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.run.context import RunContext

PATIENCE_S = 60.0
"""How long a step waits for the groups it may draw from. Only the first step of a resumed run has to wait."""

_log = structlog.get_logger()


class ReplayFeed:
    """Fills the buffer of one run."""

    def __init__(self, context: RunContext, buffer: ReplayBuffer) -> None:
        self._context = context
        self._buffer = buffer
        self._history: int | None = None
        self._whole_until = 0
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Follow until the run is closed; raises PenstockError if the broker refuses or stays away."""
        while True:
            try:
                await self._follow()
                return
            except NotRetainedError as error:
                _log.warning("the replay fell behind and goes on with what is retained", error=str(error))

    async def _follow(self) -> None:
        export = StepExport(
            self._context.client,
            run_id=self._context.run_id,
            follow=True,
            patience_s=self._context.config.run.patience_s,
        )
        async for response in export.responses():
            if response.HasField("group"):
                self._add(response)
            else:
                async with self._news:
                    self._whole_until = response.policy_version
                    self._news.notify_all()

    async def draw(self, num_groups: int, *, policy_version: int) -> list[list[TrainingSample]]:
        """Draw groups to train on again once all steps before the version have arrived, waiting at most PATIENCE_S."""
        try:
            async with asyncio.timeout(PATIENCE_S), self._news:
                await self._news.wait_for(lambda: self._whole_until >= policy_version - 1)
        except TimeoutError:
            _log.warning("a step replays what has come so far", whole_until=self._whole_until)
        return self._buffer.draw(num_groups, policy_version=policy_version)

    def forget(self, group_ids: Sequence[str]) -> None:
        """Leave these groups out from now on."""
        self._buffer.forget(group_ids)

    def _add(self, response: broker_pb2.ExportTrajectoriesResponse) -> None:
        if self._history is not None and response.history > self._history:
            self._buffer.forget_from(response.policy_version)
            self._whole_until = min(self._whole_until, response.policy_version - 1)
        self._history = response.history
        group_id = response.group.prompt.group_id
        try:
            samples = training_samples(response.group, routing=self._context.routing)
        except InvalidFieldError as error:
            _log.warning("a retained group cannot be read", group_id=group_id, error=str(error))
            return
        self._buffer.add(group_id, samples, policy_version=response.policy_version)


def replay_feed(context: RunContext) -> ReplayFeed | None:
    """The feed of a run; None if nothing is replayed."""
    run, policy = context.config.run, context.config.policy
    if not context.config.algorithm.num_replayed_groups:
        return None
    # The steps retained beyond the window serve a run that returns to its last checkpoint and draws again.
    max_steps = max(1, policy.num_retained_steps - run.checkpoint_every_steps - 1)
    return ReplayFeed(context, ReplayBuffer(max_steps=max_steps, seed=run.seed))
