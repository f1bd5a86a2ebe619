"""Two versions of the services side by side: the clients of one work with the broker of the other."""

from __future__ import annotations

import asyncio

import pytest

from penstock.clients import BrokerClient
from penstock.errors import UnknownRunError
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import eventually, serving
from tests.helpers.faults import workload
from tests.helpers.faults.generator import Generator
from tests.helpers.faults.reward import Worker
from tests.helpers.faults.trainer import Trainer
from tests.helpers.proxies.other_version import earlier, later, through_another_version

NUM_STEPS = 4


@pytest.mark.parametrize("change", [earlier, later])
async def test_a_run_whose_services_are_of_two_versions_trains_every_sample_as_it_was_sampled(tmp_path, change):
    """Generators, reward worker and trainer speak another version than the broker, and check all that they are given:
    tokens, log-probs, versions and scores follow from a sample's name."""
    async with (
        serving(MemoryStore()) as broker,
        through_another_version(f"127.0.0.1:{broker.server.port}", change) as other,
        BrokerClient(other.address) as client,
    ):
        parts = [Generator(other.address, f"gen-{index}", tmp_path, seed=index) for index in range(2)]
        parts += [Worker(other.address, "reward", tmp_path, seed=7), Trainer(client, tmp_path, seed=9)]
        running = [asyncio.create_task(part.run()) for part in parts]

        async def is_trained():
            assert not any(task.done() for task in running), [task for task in running if task.done()]
            try:
                return (await client.get_run(workload.RUN_ID)).policy_version >= NUM_STEPS
            except UnknownRunError:
                return False

        await eventually(is_trained, timeout_s=60)
        audit = await broker.audit(workload.RUN_ID)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert other.num_changes > 0
    assert audit.trained >= NUM_STEPS * workload.GROUPS_PER_STEP * workload.GROUP_SIZE
    assert [note for note in workload.notes(tmp_path) if note["kind"] in ("violation", "conflict")] == []
