"""vLLM's own schedulers with outputs held back (`held_outputs`): fewer, larger messages leave the engine process.

Nothing is decided differently, tokens are only sent later. A pause sends them first, under the version that they were
sampled with: as long as any are held the engine has work, and a pause is complete only when it has none.

Imports vLLM, so it is itself imported only in the engine process.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from penstock.process.bound_child import end_with_parent
from services.generator.engines.vllm.output_buffer import BufferedOutputs

_CLIENT = 0
"""The only process that asks for anything."""


class HoldingScheduler(Scheduler):  # type: ignore[misc]  # vLLM is untyped here
    """Holds outputs back for `stream_interval` steps."""

    def __init__(self, vllm_config: VllmConfig, *args: object, **kwargs: object) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        # vLLM's engine process waits for its next request for ever, with the model in memory, when the generator that
        # started it was killed.
        end_with_parent()
        self._outputs = BufferedOutputs(vllm_config.scheduler_config.stream_interval)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """What is sent after a step."""
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if self.pause_state != PauseState.UNPAUSED:
            self._outputs.send_next()
        message = messages.get(_CLIENT) or EngineCoreOutputs()
        message.outputs = self._outputs.take(message.outputs)
        # Statistics alone are not worth a message: the next one has newer ones.
        return {_CLIENT: message} if message.outputs or message.finished_requests else {}

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Begins or ends a pause; the first tokens after one are sent at once, since somebody may wait for them."""
        super().set_pause_state(pause_state)
        self._outputs.send_next()

    def has_requests(self) -> bool:
        """Whether there is anything to do: what is held is to be sent, too."""
        return bool(self._outputs) or super().has_requests()

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Ends requests from outside."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        self._outputs.forget(request.request_id for request in finished)
        return finished


class HoldingAsyncScheduler(HoldingScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same where vLLM schedules a step while the last one is computed."""
