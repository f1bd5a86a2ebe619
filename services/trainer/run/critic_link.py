"""A run's link to its critic, if that is a service: the compute thread waits, the event loop calls.

A critic that is away is waited for, by name, as long as `run.patience_s` allows; a stop ends the wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from penstock.clients.critic import CriticClient
from penstock.clock import Clock, SystemClock
from penstock.security import Security
from penstock.tracing import TraceContext, is_on, step_context, within
from penstock.v1 import critic_pb2, trainer_pb2
from services.trainer.batches.critic_packs import encoded_pack
from services.trainer.batches.packing import Pack
from services.trainer.reporting.events import RunEvents
from services.trainer.run.context import RunContext
from services.trainer.run_sections import critic_rate

POLL_S = 0.2
"""How soon a wait for the critic notices a stop."""
NOTICE_S = 3.0
"""A critic that takes longer to answer is worth a line: it loads its model, takes steps again, or is slow."""
_Result = TypeVar("_Result")
_log = structlog.get_logger()


class CriticLink:
    """The critic as the compute thread calls it; see `RemoteCritic`.

    Args:
        client: Opened.
        loop: In which the client's calls run.
        check: Raises InterruptedComputeError once the run is to stop.
        keep_checkpoints: Checkpoints that the trainer keeps.
        on_wait: Called in the loop with a line while an answer takes long, and with an empty one when it is there.
        step_span: Names the span of the step under way, of which the critic's are a part.
        clock: Where time comes from.
    """

    def __init__(
        self,
        client: CriticClient,
        *,
        loop: asyncio.AbstractEventLoop,
        check: Callable[[], None],
        keep_checkpoints: int,
        on_wait: Callable[[str], None] = lambda text: None,
        step_span: Callable[[], TraceContext | None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._loop = loop
        self._check = check
        self._written = deque([client.oldest_policy_version], maxlen=keep_checkpoints)
        self._clock = clock or SystemClock()
        self._on_wait = on_wait
        self._step_span = step_span
        self._waited_s = 0.0

    def values(self, packs: Sequence[Pack]) -> list[npt.NDArray[np.float32]]:
        """Values of the packs' loss tokens, float32[N] each."""
        return self._wait(self._call(self._client.evaluate([encoded_pack(pack) for pack in packs])))

    def begin_gradient(self, packs: Sequence[Pack]) -> Future[float]:
        """Begin to add the gradient of packs."""
        return self._call(self._client.accumulate([encoded_pack(pack) for pack in packs]))

    def wait_for(self, loss: Future[float]) -> float:
        """The sum of their losses."""
        return self._wait(loss)

    def give_up(self, loss: Future[float]) -> None:
        """End the call."""
        loss.cancel()

    @property
    def gradient_norm(self) -> float:
        """Norm of the mean gradient so far."""
        return self._client.gradient_norm

    @property
    def num_steps(self) -> int:
        """Optimiser steps taken in the batch under way."""
        return self._client.minibatch

    def step(self, *, rate_factor: float, is_last: bool) -> None:
        """Take the optimiser step."""
        self._wait(self._call(self._client.step(rate_factor=rate_factor, is_last=is_last)))

    def discard(self) -> None:
        """Discard the gradient; waits for no critic."""
        self._call(self._client.discard()).result()

    def take_waited_s(self) -> float:
        """Seconds for which calls have waited since this was asked last."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def note_checkpoint(self, policy_version: int) -> None:
        """The trainer has written a checkpoint, and so may go back to it and to those that it keeps before."""
        self._written.append(policy_version)
        self._client.oldest_policy_version = min(self._written)

    def _call(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        with within(self._step_span()):
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, future: Future[_Result]) -> _Result:
        begun_s, is_noticed = self._clock.monotonic_s(), False
        try:
            while True:
                try:
                    return future.result(timeout=POLL_S)
                except TimeoutError:
                    if future.done():
                        raise
                    self._check()
                    is_noticed = self._notice(self._clock.monotonic_s() - begun_s, is_first=not is_noticed)
        except CancelledError as error:
            raise RuntimeError("a call of the critic was cancelled") from error
        finally:
            future.cancel()
            self._waited_s += self._clock.monotonic_s() - begun_s
            if is_noticed:
                self._loop.call_soon_threadsafe(self._on_wait, "")

    def _notice(self, waited_s: float, *, is_first: bool) -> bool:
        """Says that an answer takes long, if it does; whether it does."""
        if waited_s < NOTICE_S or self._client.outage.is_noticed:
            # Of one that is away, the client says so.
            return not is_first
        if is_first:
            _log.warning("waiting for the critic, which has not answered", peer=self._client.peer)
        text = f"waiting for {self._client.peer} for {waited_s:.0f} s: it is loading, taking steps again, or slow"
        self._loop.call_soon_threadsafe(self._on_wait, text)
        return True


@asynccontextmanager
async def joined_critic(
    context: RunContext, *, security: Security, events: RunEvents, check: Callable[[], None]
) -> AsyncIterator[CriticLink | None]:
    """The run's critic at the trainer's version; None if the trainer has it, or the algorithm has none.

    Args:
        context: Of a run that was taken over.
        security: Certificates and token.
        events: Notified when the critic is waited for.
        check: Raises InterruptedComputeError once the run is to stop.

    Raises:
        PenstockError: The critic refuses, or was away for too long.
    """
    config = context.config
    if not config.algorithm.has_critic_service:
        yield None
        return

    def note_wait(text: str) -> None:
        if text:
            events.say_waiting(text)
        else:
            events.change_state(events.state)

    async with CriticClient(
        config.critic,
        _opening(context),
        security=security,
        patience_s=config.run.patience_s,
        on_outage=note_wait,
    ) as client:
        events.change_state(trainer_pb2.TRAINER_STATE_STARTING, f"opening critic {config.critic}")
        await client.open()
        yield CriticLink(
            client,
            loop=asyncio.get_running_loop(),
            check=check,
            keep_checkpoints=config.run.keep_checkpoints,
            on_wait=note_wait,
            step_span=partial(_step_span, context),
            clock=context.clock,
        )


def _step_span(context: RunContext) -> TraceContext | None:
    """Of the step that makes the next version; None where nothing is recorded."""
    progress = context.progress
    return step_context(context.run_id, progress.policy_version + 1, progress.history) if is_on() else None


def _opening(context: RunContext) -> critic_pb2.OpenCriticRequest:
    optimizer, version = context.config.optimizer, context.progress.policy_version
    return critic_pb2.OpenCriticRequest(
        run_id=context.run_id,
        place=critic_pb2.CriticPlace(epoch=context.owner.epoch, policy_version=version),
        instance_id=context.owner.instance_id,
        oldest_policy_version=version,
        optimizer=critic_pb2.CriticOptimizer(
            learning_rate=critic_rate(context.config),
            beta_1=optimizer.betas[0],
            beta_2=optimizer.betas[1],
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
        ),
    )
