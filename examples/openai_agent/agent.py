"""An agent that uses a tool, written against the plain `openai` client; Penstock trains the model behind it.

    python agent.py http://127.0.0.1:8000/v1 [NUM_TASKS]

Only `attempt` knows of Penstock: each attempt is a session, attempts at one task are a group, and a session ends with
its reward. The solver gets only a key for its session, as it would in a sandbox; the credential that makes keys and
gives rewards (PENSTOCK_TOKEN, of the role environment) stays outside.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys

import openai

GROUP_SIZE = 8
NUM_TASKS_AT_ONCE = 8
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]


def add(arguments: str) -> str:
    """The tool."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) + int(given["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"


async def solve(client: openai.AsyncOpenAI, model: str, question: str) -> str:
    """Two turns: the tool call, then the answer from its result."""
    messages: list = [{"role": "user", "content": question}]
    answer = (await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)).choices[0].message
    if not answer.tool_calls:
        return answer.content or ""
    messages.append(answer)
    for call in answer.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    answer = (await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)).choices[0].message
    return answer.content or ""


async def attempt(client: openai.AsyncOpenAI, model: str, task: str, index: int, a: int, b: int) -> float:
    """One session with its reward."""
    session = f"{task}-{index}"
    key: dict = await client.post("/session_keys", cast_to=object, body={"session": session, "group": task})
    answer = await solve(client.with_options(api_key=key["key"]), model, f"{a}+{b}=")
    reward = float(answer.strip() == str(a + b))
    await client.post(f"/sessions/{session}/reward", cast_to=object, body={"reward": reward})
    return reward


async def work(base_url: str, *, num_tasks: int, seed: int = 0) -> list[float]:
    """Run tasks, several concurrently, until there are enough or the run is over; returns their mean rewards."""
    rng, means = random.Random(seed), []
    room = asyncio.Semaphore(NUM_TASKS_AT_ONCE)
    api_key = os.environ.get("PENSTOCK_TOKEN", "none")
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=8, timeout=300) as client:
        model = (await client.models.list()).data[0].id

        async def do(number: int, a: int, b: int) -> None:
            async with room:
                task = f"task{number}"
                attempts = (attempt(client, model, task, index, a, b) for index in range(GROUP_SIZE))
                means.append(sum(await asyncio.gather(*attempts)) / GROUP_SIZE)
                if len(means) % 32 == 0:
                    print(f"{len(means)} tasks, mean reward of the last 32: {sum(means[-32:]) / 32:.3f}", flush=True)

        tasks = [asyncio.create_task(do(n, rng.randint(1, 99), rng.randint(1, 99))) for n in range(num_tasks)]
        try:
            await asyncio.gather(*tasks)
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            print(f"the endpoint is gone, so the run is over: {error}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return means


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], num_tasks=int(sys.argv[2]) if len(sys.argv) > 2 else 100_000))
