"""Polls the run at the broker once a second: decoding spans, dropped groups, the run's owner."""

from __future__ import annotations

import asyncio

import structlog

from penstock.errors import PenstockError
from penstock.v1 import broker_pb2
from penstock.wire.timestamps import unix_s
from services.trainer.reporting.overlap import OverlapMeter
from services.trainer.run.context import RunContext
from services.trainer.run.prompt_feeder import PromptFeeder

POLL_S = 1.0
LOOK_BACK_S = 10.0
"""Recent spans are requested again for this long: a heartbeat may bring them late, and the meter recognises repeats."""

_log = structlog.get_logger()


class RunMonitor:
    """Feeds the overlap meter; a broker that is away costs only detail."""

    def __init__(self, *, context: RunContext, meter: OverlapMeter, feeder: PromptFeeder | None) -> None:
        self._context = context
        self._meter = meter
        self._feeder = feeder
        self._last_poll_s: float | None = None
        """Time by the run's clock."""

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                await self.poll()
            except PenstockError as error:
                if not error.is_retryable:
                    raise
                _log.warning("the broker does not answer", error=str(error))
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Poll once; raises PenstockError, including FencedError."""
        since_s = None if self._last_poll_s is None else self._last_poll_s - LOOK_BACK_S
        view = await self._context.client.get_run(self._context.run_id, busy_since_s=since_s)
        at_s = self._context.clock.monotonic_s()
        self._last_poll_s = unix_s(view.now_time)
        self._context.check_view(view)
        for generator in view.generators:
            self._take_spans(generator, ahead_s=self._last_poll_s - at_s)
        self._meter.settle(at_s)
        if self._feeder is not None:
            self._feeder.note_dropped_samples(sum(view.audit.dropped.values()))

    def _take_spans(self, generator: broker_pb2.GeneratorView, *, ahead_s: float) -> None:
        spans = [(unix_s(span.start_time), unix_s(span.end_time)) for span in generator.busy_spans]
        self._meter.add_generator_spans(generator.hello.generator_id, spans, ahead_s=ahead_s)
