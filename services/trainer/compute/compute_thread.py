"""The one thread in which PyTorch works, so that the event loop stays free for gRPC and HTTP.

Promises:

- Calls run one after the other, in the order they were made; a backend never sees two at once.
- Cancelling a caller does not leave its call running unnoticed: the caller ends only when the call has.
- After `interrupt`, a forward pass that has not begun raises InterruptedComputeError instead: a stop waits for at most
  one pack; but once the first of several optimiser steps of a batch was taken, for the others too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.clock import Clock
from penstock.model.adapter_layout import AdapterSpec
from penstock.process.tasks import uninterrupted
from services.trainer.batches.packing import Pack
from services.trainer.model.backend import Backend, BackendError, LossTotals, StepMetrics, TokenScores

if TYPE_CHECKING:
    from torch import Tensor

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class InterruptedComputeError(BackendError):
    """The run is being stopped; nothing of the pack was added."""


class ComputeThread:
    """Runs calls in its thread; `on_span` hears when each began and ended, by the monotonic clock."""

    def __init__(self, *, clock: Clock, on_span: Callable[[float, float], None]) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._clock = clock
        self._on_span = on_span
        self.busy_s = 0.0

    async def run(
        self, function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _Result:
        """`function(*args, **kwargs)` in the thread."""
        start_s = self._clock.monotonic_s()
        loop = asyncio.get_running_loop()

        async def in_thread() -> _Result:
            return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

        try:
            return await uninterrupted(in_thread())
        finally:
            end_s = self._clock.monotonic_s()
            self.busy_s += end_s - start_s
            self._on_span(start_s, end_s)

    def close(self) -> None:
        """Let the thread end; nothing may be running."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class InterruptibleBackend:
    """A `Backend` whose forward passes can be called off from another thread; otherwise it only passes calls on."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_interrupted = threading.Event()
        self._is_between_steps = False

    def interrupt(self) -> None:
        """Let no further forward pass begin."""
        self._is_interrupted.set()

    @property
    def vocab_size(self) -> int:
        """See `Backend`."""
        return self._backend.vocab_size

    @property
    def max_sequence_length(self) -> int:
        """See `Backend`."""
        return self._backend.max_sequence_length

    @property
    def adapter(self) -> AdapterSpec | None:
        """See `Backend`."""
        return self._backend.adapter

    @property
    def shares(self) -> tuple[float, ...]:
        """See `Backend`."""
        return self._backend.shares

    def forward_backward(self, *packs: Pack | None) -> LossTotals:
        """See `Backend`; raises InterruptedComputeError after `interrupt`."""
        self._stop_if_interrupted()
        return self._backend.forward_backward(*packs)

    def forward_logprobs(self, pack: Pack) -> npt.NDArray[np.float32]:
        """See `Backend`; raises InterruptedComputeError after `interrupt`."""
        self._stop_if_interrupted()
        return self._backend.forward_logprobs(pack)

    def reference_logprobs(self, pack: Pack) -> npt.NDArray[np.float32]:
        """See `Backend`; raises InterruptedComputeError after `interrupt`."""
        self._stop_if_interrupted()
        return self._backend.reference_logprobs(pack)

    def token_scores(self, pack: Pack, *, with_log_ratios: bool) -> TokenScores:
        """See `Backend`; raises InterruptedComputeError after `interrupt`."""
        self._stop_if_interrupted()
        return self._backend.token_scores(pack, with_log_ratios=with_log_ratios)

    def refresh_reference(self) -> None:
        """See `Backend`."""
        self._backend.refresh_reference()

    def optimizer_step(self, *, divisor: int, is_last: bool = True) -> StepMetrics:
        """See `Backend`."""
        metrics = self._backend.optimizer_step(divisor=divisor, is_last=is_last)
        self._is_between_steps = not is_last
        return metrics

    def discard_gradients(self) -> None:
        """See `Backend`."""
        self._backend.discard_gradients()

    def close(self) -> None:
        """See `Backend`."""
        self._backend.close()

    def state_tensors(self) -> dict[str, Tensor]:
        """See `Backend`."""
        return self._backend.state_tensors()

    def save(self, directory: Path) -> Future[None]:
        """See `Backend`."""
        return self._backend.save(directory)

    def load(self, directory: Path) -> None:
        """See `Backend`."""
        self._backend.load(directory)

    def _stop_if_interrupted(self) -> None:
        if self._is_interrupted.is_set() and not self._is_between_steps:
            raise InterruptedComputeError("the run is being stopped")
