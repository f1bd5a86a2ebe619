"""A run's link to its broker: its owner name, whether the broker is away, and calls that must not wait long.

A broker that does not answer within BROKER_PATIENCE_S never prevents a checkpoint or a summary from being written.
"""

from __future__ import annotations

import asyncio

import structlog

from penstock.clients.broker import BrokerClient
from penstock.clock import Clock
from penstock.errors import FencedError, PenstockError, UnknownRunError
from penstock.network.outage import Outage
from penstock.security import Security
from penstock.v1 import broker_pb2, trainer_pb2
from services.trainer.folders.run_instance import new_owner_id
from services.trainer.reporting.events import RunEvents
from services.trainer.reporting.progress import Progress
from services.trainer.run.context import KeepOwner, RunContext, RunSpec

BROKER_PATIENCE_S = 3.0

_log = structlog.get_logger()


class BrokerLink:
    """Makes clients of one run's broker, and the run's calls to it outside training."""

    def __init__(self, spec: RunSpec, *, security: Security, clock: Clock, events: RunEvents) -> None:
        self._spec = spec
        self._security = security
        self._clock = clock
        self._events = events
        self.owner = broker_pb2.RunOwner(owner_id=new_owner_id())
        self.keep_owner: KeepOwner = lambda owner: None
        """Passed to each `RunContext`."""
        self.outage: Outage | None = None
        """Whether the broker is away; None before the first call."""

    def client(self) -> BrokerClient:
        """A client that waits for the broker as long as the configuration allows."""
        config = self._spec.config
        client = BrokerClient(
            config.broker, security=self._security, patience_s=config.run.patience_s, on_outage=self._note_outage
        )
        self.outage = client.outage
        return client

    def context(self, client: BrokerClient, progress: Progress) -> RunContext:
        """The run's context for calls of that client."""
        client.owner = self.owner if self.owner.epoch else None
        return RunContext(
            spec=self._spec,
            client=client,
            progress=progress,
            version_lock=asyncio.Lock(),
            clock=self._clock,
            owner=self.owner,
            keep_owner=self.keep_owner,
        )

    async def check_not_replaced(self) -> None:
        """Check, before an automatic resume touches the run's folder, that it has no new trainer.

        Raises FencedError, and what `BrokerClient.get_run` does.
        """
        known = self._spec.resumes
        if known is None:
            return
        self._events.change_state(trainer_pb2.TRAINER_STATE_STARTING, f"asking broker {self._spec.config.broker}")
        async with self.client() as client:
            try:
                view = await client.get_run(self._spec.run_id)
            except UnknownRunError:
                return
        if view.owner.epoch > known.epoch and view.owner.owner_id != known.owner_id:
            raise FencedError(
                f"fenced: trainer {view.owner.owner_id!r} took run {self._spec.run_id!r} over (epoch "
                f"{view.owner.epoch}, this trainer last knew {known.epoch}), so it is not resumed here automatically; "
                "start it here to take it back"
            )

    async def newest_epoch(self) -> int:
        """That of the run's newest take-over, 0 if the broker does not know the run; raises as `get_run` does."""
        async with self.client() as client:
            try:
                return (await client.get_run(self._spec.run_id)).owner.epoch
            except UnknownRunError:
                return 0

    async def check_owner(self, progress: Progress) -> None:
        """Raises FencedError if another trainer is known to have taken over the run."""
        async with self._hasty_client() as client:
            try:
                async with asyncio.timeout(BROKER_PATIENCE_S):
                    await self.context(client, progress).check_owner()
            except FencedError:
                raise
            except (PenstockError, TimeoutError) as error:
                _log.warning("not known whether this is still the run's trainer", error=str(error))

    async def final_audit(self, progress: Progress) -> broker_pb2.Audit | None:
        """Report a step whose acknowledgement the stop interrupted, then fetch the run's counters.

        None if the broker does not answer soon or does not know the run; the checkpoint has everything.
        """
        async with self._hasty_client() as client:
            try:
                async with asyncio.timeout(BROKER_PATIENCE_S):
                    if progress.acked_version < progress.policy_version:
                        await self.context(client, progress).open_run(progress.policy_version)
                        progress.acked_version = progress.policy_version
                    return await client.audit(self._spec.run_id)
            except (PenstockError, TimeoutError) as error:
                _log.warning("no audit in the summary: the broker does not answer", error=str(error))
                return None

    def _hasty_client(self) -> BrokerClient:
        return BrokerClient(self._spec.config.broker, security=self._security, patience_s=BROKER_PATIENCE_S)

    def _note_outage(self, text: str) -> None:
        if text:
            self._events.say_waiting(text)
        else:
            self._events.change_state(self._events.state)
