"""Agents' sessions outlive the endpoints that answer them, and the broker: real processes, killed between turns."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from penstock.clients.broker import BrokerClient
from penstock.v1 import broker_pb2, types_pb2
from tests.helpers.brokers.broker import duration, limits
from tests.helpers.brokers.broker_process import BrokerProcess
from tests.helpers.generators.generator_bench import Bench
from tests.helpers.generators.openai_endpoint import save_chat_model
from tests.helpers.ports import free_address, free_port
from tests.helpers.serving import serving
from tests.helpers.stores.redis_server import RedisProcess

pytestmark = pytest.mark.timeout(400)
RUN, LEASE_S = "r", 4
SERVE = """
import json, sys, uvloop
from services.generator.config import GeneratorConfig
from services.generator.server import serve
uvloop.run(serve(GeneratorConfig(**json.loads(sys.argv[1]))))
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    server = RedisProcess(tmp_path, is_persistent=True)
    server.start()
    process = BrokerProcess(server.url)
    yield process
    process.kill()
    server.kill()


@pytest.fixture
async def weights(tmp_path: Path) -> AsyncIterator[str]:
    bench = Bench(tmp_path)
    config = save_chat_model(tmp_path / "model") / "config.json"
    stated = json.loads(config.read_text())
    config.write_text(json.dumps({**stated, "vocab_size": stated["eos_token_id"] + 1}))
    async with bench.store.serving_content(), serving(bench.store.service()) as (_, target):
        await bench.store.publish(0)
        yield target


class Endpoint:
    """A generator with an endpoint, in a process of its own, started again at the same addresses."""

    def __init__(self, folder: Path, name: str, broker: str, weights: str) -> None:
        self._port = free_port()
        document = {
            "generator_id": name,
            "listen": free_address(),
            "run_id": RUN,
            "broker": broker,
            "weights": weights,
            "model_path": str(folder / "model"),
            "cache_dir": str(folder / "cache"),
            "engine": {"engine": "emulated", "emulated_mean_tokens": 6},
            "openai": {"listen": f"127.0.0.1:{self._port}", "model_name": "tiny", "temperature": 1.0},
        }
        self._command = (sys.executable, "-c", SERVE, json.dumps(document))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(timeout=10)
            self.process = None

    async def call(self, method: str, path: str, body: Any = None, headers: Any = None) -> Any:
        """Its answer, asked again while it starts and as often as it says that a retry may help."""
        async with asyncio.timeout(150), aiohttp.ClientSession() as http:
            while True:
                try:
                    url = f"http://127.0.0.1:{self._port}{path}"
                    async with http.request(method, url, json=body, headers=headers) as answer:
                        if answer.status == 200:
                            return await answer.json()
                        assert answer.status in (409, 429, 503), await answer.text()
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.1)

    async def turn(self, session: str, token_ids: list[int]) -> list[int]:
        """What is sampled after these tokens; the same for the same tokens, as for a client that asks again."""
        headers = {"X-Session-ID": session, "X-Penstock-Group": "task", "Idempotency-Key": f"turn-{len(token_ids)}"}
        body = {"token_ids": token_ids, "sampling_params": {"max_tokens": 32}}
        answer = await self.call("POST", "/inference/v1/generate", body, headers)
        sampled: list[int] = answer["choices"][0]["token_ids"]
        return sampled

    async def num_turns(self, session: str) -> int:
        found: int = (await self.call("GET", f"/v1/sessions/{session}"))["turns"]
        return found

    async def reward(self, session: str, reward: float) -> None:
        await self.call("POST", f"/v1/sessions/{session}/reward", {"reward": reward})


@pytest.fixture
def endpoints(tmp_path: Path, broker: BrokerProcess, weights: str) -> Iterator[tuple[Endpoint, Endpoint]]:
    made = [Endpoint(tmp_path, name, broker.address, weights) for name in ("one", "two")]
    yield made[0], made[1]
    for endpoint in made:
        endpoint.kill()


async def test_a_session_goes_on_where_its_only_endpoint_is_killed_and_where_another_one_takes_over(
    broker: BrokerProcess, endpoints: tuple[Endpoint, Endpoint]
) -> None:
    one, two = endpoints
    await broker.start()
    async with BrokerClient(broker.address) as client:
        bounds = limits(groups_per_step=1, group_size=2, max_completion_tokens=512, generation_lease=duration(LEASE_S))
        await client.open_run(RUN, limits=bounds, policy=broker_pb2.RunPolicy(), policy_version=0)
        one.start()
        spoken = [5, 6, 7]
        sampled = [await one.turn("s", spoken)]
        await one.turn("sibling", [5, 6, 8])
        await one.reward("sibling", 0.25)

        # The run's only endpoint, and then the broker.
        one.kill()
        found = (await client.audit(RUN)).sessions
        assert (found.opened, found.open) == (2, 2)
        one.start()
        assert await one.turn("s", spoken) == sampled[0]
        assert await one.num_turns("s") == 1
        spoken += [*sampled[0], 9]
        sampled.append(await one.turn("s", spoken))
        assert await one.num_turns("s") == 2
        broker.kill()
        await broker.start()

        # For good: another one, which has never heard of either, goes on with both.
        two.start()
        one.kill()
        assert await two.turn("s", spoken) == sampled[1]
        assert await two.num_turns("s") == 2
        spoken += [*sampled[1], 9]
        sampled.append(await two.turn("s", spoken))
        assert await two.num_turns("s") == 3
        await two.reward("s", 1.0)
        await _train(client, sampled)
        books = await client.audit(RUN)
    assert (books.submitted, books.trained, books.in_flight, dict(books.dropped)) == (2, 2, 0, {})
    found = books.sessions
    assert (found.opened, found.put, dict(found.dropped), found.open) == (2, 2, {}, 0)
    assert books.balanced


async def _train(client: BrokerClient, sampled: list[list[int]]) -> None:
    async with client.consumer(RUN, "rank-0", max_held_groups=1) as session:
        microbatch = await session.next(timeout_s=40)
        assert microbatch is not None
        [group] = microbatch.groups
        rewards = {sample.score.value: sample for sample in group.trajectories}
        assert sorted(rewards) == [0.25, 1.0]
        # Each turn's own tokens, whichever process sampled them; the "9" between them is given.
        sample: types_pb2.Trajectory = rewards[1.0]
        ids, mask = np.frombuffer(sample.token_ids, "<i4").tolist(), list(sample.loss_mask)
        counted = [token_id for token_id, bit in zip(ids, mask, strict=True) if bit]
        assert counted == [token_id for turn in sampled for token_id in turn]
        assert [token_id for token_id, bit in zip(ids, mask, strict=True) if not bit] == [7, 9, 9]
    await client.ack_step(RUN, consumer_id="rank-0", group_ids=[group.prompt.group_id], policy_version=1)
