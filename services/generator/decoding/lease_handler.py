"""The generator's side of the lease stream: its state, and how it handles what arrives."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.clients.leases import MAX_WARNING_CHARACTERS
from penstock.process.busy_time import BusyTracker
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.timestamps import timestamp
from services.generator.decoding.sample_runner import Rollouts
from services.generator.decoding.token_rate import TokenRate
from services.generator.decoding.traces import record_periods
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.engine import Engine


class GeneratorLeaseHandler:
    """A `penstock.clients.leases.LeaseHandler`."""

    def __init__(
        self,
        *,
        engine: Engine,
        rollouts: Rollouts,
        held: AttestedWeights,
        busy: BusyTracker,
        rate: TokenRate,
        on_owner: Callable[[broker_pb2.RunOwner], None],
    ) -> None:
        self._on_owner = on_owner
        self._engine = engine
        self._rollouts = rollouts
        self._held = held
        self._busy = busy
        self._rate = rate
        self.is_draining = False
        """Reported in every heartbeat from now on."""
        self.warning: Callable[[], str] = lambda: ""
        """What is wrong with the process's certificate."""

    def num_free_slots(self) -> int:
        """Leases it can take now."""
        return self._rollouts.num_free_slots()

    def beat(self) -> broker_pb2.GeneratorBeat:
        """Its state now, with the busy spans since the last heartbeat."""
        stats, held = self._engine.stats(), self._held.current
        busy_spans = self._busy.take_spans()
        record_periods(busy_spans)
        return broker_pb2.GeneratorBeat(
            policy_version=held.policy_version if held is not None else 0,
            history=held.history if held is not None else None,
            instance_id=held.instance_id if held is not None else "",
            active_lease_ids=self._rollouts.lease_ids,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=min(1.0, max(0.0, stats.kv_cache_usage)),
            tokens_per_second=self._rate.update(stats.tokens_generated, time.monotonic()),
            busy_spans=[
                types_pb2.TimeSpan(start_time=timestamp(start_s), end_time=timestamp(end_s))
                for start_s, end_s in busy_spans
            ],
            is_draining=self.is_draining,
            now_time=timestamp(self._busy.now_s()),
            warning=self.warning()[:MAX_WARNING_CHARACTERS],
            refused_chunks=self._rollouts.refused_chunks,
        )

    def lease(self, lease: broker_pb2.Lease) -> None:
        """New leases."""
        self._rollouts.begin(lease)

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        """Revoked leases."""
        self._rollouts.drop(revocation.lease_id, f"revoked: {revocation.reason}")

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        """The run's owner, whose weights may be installed."""
        self._on_owner(owner)

    def run_closed(self) -> None:
        """Every lease is void."""
        self._rollouts.drop_all("run closed")
