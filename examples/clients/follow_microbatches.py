"""Trains on a run's groups until it is closed: python follow_microbatches.py 127.0.0.1:7301 RUN."""

import asyncio
import sys

from penstock.clients import BrokerClient, Security, samples_of


async def main(address: str, run_id: str) -> None:
    security = Security.from_environment()
    async with BrokerClient(address, security=security) as broker, broker.consumer(run_id, "follower") as consumer:
        async for microbatch in consumer:
            for group in microbatch.groups:
                print(group.prompt.group_id, *(sample.reward for sample in samples_of(group)))
            await consumer.ack(microbatch.groups)


asyncio.run(main(*sys.argv[1:]))
