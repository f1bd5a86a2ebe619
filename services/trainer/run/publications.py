"""Publishes a run's versions one after the other, each beside the step after it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.trainer.compute.compute_thread import ComputeThread
from services.trainer.model.backend import Backend
from services.trainer.publishing.publisher import WeightPublisher

if TYPE_CHECKING:
    from torch import Tensor


class Publications:
    """At most one version is on its way to the disk.

    Args:
        publisher: Open.
        compute: The thread in which the backend works.
        backend: Holds the weights.
        history: The run's history counter.
    """

    def __init__(self, publisher: WeightPublisher, *, compute: ComputeThread, backend: Backend, history: int) -> None:
        self._publisher = publisher
        self._compute = compute
        self._backend = backend
        self._history = history
        self._publishing: asyncio.Future[float] | None = None
        self._last_s = 0.0

    async def publish(self, policy_version: int) -> None:
        """Publish the present weights and wait for it."""
        await (await self._started(policy_version))

    async def begin(self, policy_version: int) -> None:
        """Copy the present weights, then write and offer them beside whatever comes next.

        Waits for the version before, and raises what publishing that raised.
        """
        await self.finish()
        self._publishing = await self._started(policy_version)

    async def finish(self) -> None:
        """Returns when the last version that was begun is published; raises what publishing raised."""
        if self._publishing is not None:
            self._last_s = await self._publishing
            self._publishing = None

    @property
    def last_s(self) -> float:
        """How long the last of those took that is known to have ended, seconds."""
        publishing = self._publishing
        is_known = publishing is not None and publishing.done() and not publishing.cancelled()
        if publishing is not None and is_known and publishing.exception() is None:
            self._last_s = publishing.result()
        return self._last_s

    async def _started(self, policy_version: int) -> asyncio.Future[float]:
        tensors = await self._compute.run(_copied, self._backend)
        publishing = self._publisher.publish(
            tensors, policy_version=policy_version, history=self._history, adapter=self._backend.adapter
        )
        return asyncio.ensure_future(publishing)


def _copied(backend: Backend) -> dict[str, Tensor]:
    """The weights, on the CPU, in memory of their own: the next step changes the backend's in place."""
    return {name: tensor.cpu().clone().contiguous() for name, tensor in backend.state_tensors().items()}
