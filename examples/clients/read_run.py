"""Reads a run's state, counters and trained groups: python read_run.py 127.0.0.1:7301 RUN."""

import asyncio
import sys

from penstock.clients import BrokerClient, Security, samples_of


async def main(address: str, run_id: str) -> None:
    async with BrokerClient(address, security=Security.from_environment()) as broker:
        run, audit = await broker.get_run(run_id), await broker.audit(run_id)
        print(f"version {run.policy_version}, closed: {run.is_closed}, generators: {len(run.generators)}")
        print(f"submitted {audit.submitted}, trained {audit.trained}, in flight {audit.in_flight}")
        async for group, version in broker.export(run_id):
            print(f"step {version}: {group.prompt.group_id}", *(sample.reward for sample in samples_of(group)))


asyncio.run(main(*sys.argv[1:]))
