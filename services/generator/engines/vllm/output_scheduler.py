"""Buffers the outputs of vLLM's own schedulers (`output_buffer`), for fewer, larger messages from the engine process.

Scheduling decisions are unchanged; tokens are only sent later. A pause sends them first, under the version that they
were sampled with: while any are buffered the engine has work, and a pause is complete only when it has none.

Imports vLLM, so import this only in the engine process.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from penstock.process.bound_child import end_with_parent
from services.generator.engines.vllm.output_buffer import BufferedOutputs
from services.generator.engines.vllm.process_setup import RECORDS_ROUTES

_CLIENT = 0
"""The index of vLLM's only client process."""


class HoldingScheduler(Scheduler):  # type: ignore[misc]  # vLLM is untyped here
    """Buffers outputs for `stream_interval` steps."""

    def __init__(self, vllm_config: VllmConfig, *args: object, **kwargs: object) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        # If the generator that started it is killed, vLLM's engine process waits forever for its next request, with
        # the model in memory.
        end_with_parent()
        if (vllm_config.additional_config or {}).get(RECORDS_ROUTES):
            self.aux_output_connector = AuxOutputSchedulerConnector()
        self._outputs = BufferedOutputs(vllm_config.scheduler_config.stream_interval)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """The outputs to send after a step."""
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if self.pause_state != PauseState.UNPAUSED:
            self._outputs.send_next()
        message = messages.get(_CLIENT) or EngineCoreOutputs()
        message.outputs = self._outputs.take(message.outputs)
        # Statistics alone are not worth a message: the next message has newer ones.
        return {_CLIENT: message} if message.outputs or message.finished_requests else {}

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Begins or ends a pause; the first tokens after it are sent at once, since a client may be waiting."""
        super().set_pause_state(pause_state)
        self._outputs.send_next()

    def has_requests(self) -> bool:
        """Whether there is anything to do, which includes sending buffered outputs."""
        return bool(self._outputs) or super().has_requests()

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Aborts or finishes requests from outside."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        self._outputs.forget(request.request_id for request in finished)
        return finished


class HoldingAsyncScheduler(HoldingScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same for vLLM's asynchronous scheduling, which plans a step during the previous one."""
