"""Submits prompts for a run's generators to answer: python submit_prompts.py 127.0.0.1:7301 RUN."""

import asyncio
import sys

from penstock.clients import BrokerClient, Security, make_prompt


async def main(address: str, run_id: str) -> None:
    async with BrokerClient(address, security=Security.from_environment()) as broker:
        prompts = [make_prompt([1, 2, 3], group_id=f"row-{row}", text="1+1=", answer="2") for row in range(8)]
        await broker.submit(run_id, prompts)
    print(f"{len(prompts)} prompts are submitted")


asyncio.run(main(*sys.argv[1:]))
