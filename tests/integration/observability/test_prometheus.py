"""A real Prometheus reads a real broker by the deployed rules, time compressed: faults are told, named, and resolved.

The neighbours named `test_*_alerts.py` provoke the others, in `make test-grids`.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.network.rpc import open_channel
from tests.helpers.brokers.broker import Generator
from tests.helpers.observability.faulty_clients import (
    called,
    claim_future_weights,
    meanwhile,
    repeat_prompts,
    send_tokens_again,
    submit_too_much,
)
from tests.helpers.observability.prometheus import needs_prometheus, prometheus
from tests.helpers.observability.served import Served, started

pytestmark = [needs_prometheus, pytest.mark.timeout(600)]


async def test_lies_repetitions_a_full_queue_and_a_dead_broker_are_alerted_and_resolved(tmp_path: Path) -> None:
    # Each repeated call has a span, and there is no collector.
    nowhere = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_SAMPLER_ARG": "1"}
    broker = Served("broker", tmp_path, "redis_url=memory://", variables=nowhere)
    async with AsyncExitStack() as stack:
        stack.enter_context(started(broker))
        seen = await stack.enter_async_context(prometheus(tmp_path / "prometheus"))
        await broker.until_serving()
        instance = seen.watch("broker", broker.metrics)
        channel = await stack.enter_async_context(open_channel(broker.address))
        calls = called(channel)
        for run_id in ("r", "full"):
            await calls.open(run_id=run_id, max_queued_groups=4, max_staleness=4)
        await seen.until_read(instance)

        async with meanwhile(repeat_prompts(calls, "r")), meanwhile(submit_too_much(calls, "full")):
            await claim_future_weights(Generator.connect(channel, "liar", run_id="full"))
            await seen.until_fires("PenstockUnattestedChunks", instance=instance, severity="critical")
            async with meanwhile(send_tokens_again(Generator.connect(channel, "doubled", run_id="full"))):
                await asyncio.gather(
                    seen.until_fires("PenstockRepetitions", instance=instance, kind="prompt"),
                    seen.until_fires("PenstockQueueRefuses", instance=instance, queue="prompts"),
                    seen.until_fires("PenstockTokensRefused", instance=instance, reason="OFFSET_MISMATCH"),
                    seen.until_fires("PenstockSpansLost", instance=instance, at="collector"),
                )
        mended = {
            "PenstockUnattestedChunks",
            "PenstockRepetitions",
            "PenstockQueueRefuses",
            "PenstockTokensRefused",
            "PenstockSpansLost",
        }
        await asyncio.gather(*(seen.until_resolved(name) for name in mended))
        assert await seen.ever_fired() == mended

        broker.kill()
        await seen.until_fires("PenstockServiceDown", job="penstock-broker", instance=instance)
        broker.start()
        await seen.until_resolved("PenstockServiceDown")
