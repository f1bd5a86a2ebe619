"""The CriticService: calls of one trainer, in their order, in the thread in which the critic computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import structlog

from penstock.clock import SystemClock
from penstock.config import ConfigError
from penstock.errors import InvalidFieldError, RunConflictError, ServiceUnavailableError
from penstock.names import check_run_id
from penstock.tracing.measuring import measuring
from penstock.v1 import critic_pb2, critic_pb2_grpc
from penstock.wire.codec import float32_bytes
from services.trainer.checkpoints.checkpoint import CheckpointFormatError
from services.trainer.compute.compute_thread import ComputeThread
from services.trainer.critic.critic_run import CriticRun
from services.trainer.model.backend import BackendError

_Context = grpc.aio.ServicerContext[Any, Any]
_Result = TypeVar("_Result")
_log = structlog.get_logger()


class CriticService(critic_pb2_grpc.CriticServiceServicer):
    """Serves one run's critic.

    Args:
        run_id: The only run that may open it.
        critic: It.
    """

    def __init__(self, run_id: str, critic: CriticRun) -> None:
        self._run_id = run_id
        self._critic = critic
        self._compute = ComputeThread(clock=SystemClock(), on_span=lambda start_s, end_s: None)
        self._steps: set[asyncio.Task[None]] = set()
        self._is_ending = False

    async def OpenCritic(
        self, request: critic_pb2.OpenCriticRequest, context: _Context
    ) -> critic_pb2.OpenCriticResponse:
        """Bring the critic to a place."""
        check_run_id(request.run_id)
        if request.run_id != self._run_id:
            raise RunConflictError(
                f"run_id: {request.run_id!r}, but this critic serves run {self._run_id!r}; start one with that run_id"
            )
        if request.place.policy_version < 0 or request.place.epoch < 0 or not request.instance_id:
            raise InvalidFieldError("place: a version and an epoch of at least 0, and an instance_id", field="place")
        return await self._run("open", self._critic.open, request)

    async def EvaluatePack(
        self, request: critic_pb2.EvaluatePackRequest, context: _Context
    ) -> critic_pb2.EvaluatePackResponse:
        """Values of a pack."""
        values = await self._run("evaluate", self._critic.evaluate, request)
        return critic_pb2.EvaluatePackResponse(values=float32_bytes(values))

    async def AccumulateGradient(
        self, request: critic_pb2.AccumulateGradientRequest, context: _Context
    ) -> critic_pb2.AccumulateGradientResponse:
        """Add a pack to the gradient."""
        return await self._run("accumulate", self._critic.accumulate, request)

    async def StepCritic(
        self, request: critic_pb2.StepCriticRequest, context: _Context
    ) -> critic_pb2.StepCriticResponse:
        """Take a step; answered as soon as it is on the disk, so that trainer and critic step side by side."""
        loop, recorded = asyncio.get_running_loop(), asyncio.Event()

        def note_recorded() -> None:
            loop.call_soon_threadsafe(recorded.set)

        async def step() -> None:
            await self._run("step", lambda asked: self._critic.step(asked, on_recorded=note_recorded), request)

        # Goes on to its end even if the caller is gone.
        task = asyncio.create_task(step())
        self._steps.add(task)
        task.add_done_callback(self._note_end)
        waiter = asyncio.create_task(recorded.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if not recorded.is_set():
            # It was refused, or is done.
            await task
        return critic_pb2.StepCriticResponse()

    async def close(self) -> None:
        """End what is under way, complete the checkpoint that is being written, and refuse further calls for now."""
        self._is_ending = True
        try:
            await self._compute.run(self._critic.finish)
        except (OSError, ConfigError) as error:
            _log.error("the critic's checkpoint was not written; the journal has its steps", error=str(error))
        self._compute.close()
        self._critic.release()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._steps.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("a step was not taken", error=str(error))

    async def _run(self, what: str, function: Callable[[Any], _Result], request: Any) -> _Result:
        """The call in the critic's thread, `what` in its span, which is a part of the step that asked for it.

        A disk or storage that refuses may be mended, and the trainer waits; a model or checkpoint that does not fit
        ends its run.
        """
        if self._is_ending:
            raise ServiceUnavailableError("the critic is ending; its next process goes on from here")
        try:
            place = {"rl.policy.version": request.place.policy_version, "rl.minibatch": request.place.minibatch}
            with measuring(f"rl.critic.{what}", place, run_id=self._run_id):
                return await self._compute.run(function, request)
        except (OSError, ConfigError) as error:
            _log.error("the critic cannot go on", error=str(error))
            raise ServiceUnavailableError(f"the critic cannot go on: {error}") from error
        except (BackendError, CheckpointFormatError) as error:
            _log.error("the critic cannot be opened", error=str(error))
            raise RunConflictError(f"the critic cannot be opened: {error}") from error
