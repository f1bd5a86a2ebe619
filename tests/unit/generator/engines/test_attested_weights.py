from __future__ import annotations

import asyncio

import pytest

from penstock.v1.weights_pb2 import WeightsManifest
from services.generator.engine.attested_weights import AttestedWeights


async def test_waiters_go_on_when_their_version_is_attested():
    held = AttestedWeights()
    waiter = asyncio.create_task(held.wait_for(2))
    await held.attest(WeightsManifest(policy_version=1, history=0, digest="a"))
    await asyncio.sleep(0)
    assert not waiter.done()
    await held.attest(WeightsManifest(policy_version=2, history=0, digest="b"))
    async with asyncio.timeout(1):
        await waiter


async def test_nothing_begins_while_the_engine_is_in_doubt():
    held = AttestedWeights()
    await held.attest(WeightsManifest(policy_version=3, history=0, digest="a"))
    held.distrust()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await held.wait_for(1)
    assert held.current is not None
    assert not held.is_trusted
