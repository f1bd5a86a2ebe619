"""Puts finished groups into a run: python put_groups.py 127.0.0.1:7301 RUN."""

import asyncio
import sys

from penstock.clients import BrokerClient, Sample, Security, make_group, make_prompt


async def main(address: str, run_id: str) -> None:
    async with BrokerClient(address, security=Security.from_environment()) as broker, broker.producer(run_id) as to:
        for task in range(8):
            prompt = make_prompt([1, 2, 3], group_id=f"task-{task}")
            samples = [Sample(token_ids=[7, 8], logprobs=[-0.1, -2.3], policy_version=0, reward=r) for r in (0.0, 1.0)]
            await to.put(make_group(prompt, samples))
        await to.flush()
    print("8 groups are stored")


asyncio.run(main(*sys.argv[1:]))
