"""Nonsense to every HTTP route in every role: the listeners go on, answer in words, and do not grow."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.broker_model.profile import IS_LONG, TIMEOUT_S
from tests.helpers.fuzzing.http_requests import HttpFuzzer
from tests.helpers.fuzzing.server import TOKENS
from tests.helpers.fuzzing.watched_server import watched_server

NUM_INPUTS = 100_000 if IS_LONG else 1_000
SEED = random.randrange(1 << 32) if IS_LONG else 23
AT_ONCE = 256 if IS_LONG else 16
MAX_GROWTH_BYTES = 20 * 1024 * 1024
PATIENCE_S = 1.0
"""Requests that were cut off are waited for by the server, and left by the test after as long."""
CALLERS = {**TOKENS, "nobody": None, "a wrong token": "operator:fedcba9876543210"}
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {
    **{"model": "tiny", "messages": MESSAGES, "prompt": "hi", "max_tokens": 3, "n": 1, "seed": 1, "user": "u"},
    **{"temperature": 1.0, "top_p": 1.0, "stop": ["x"], "stream": False, "logprobs": True, "tools": []},
}
KEY = {"session": "r", "opens": ["complete"], "valid_s": 60}
REWARD = {"reward": 1.0, "reason": "r", "group": "g", "metadata": {}}
LISTENERS = (
    ([("GET", "/weights/{run_id}/{name}"), ("GET", "/weights/r/x")], {}),
    ([("GET", "/metrics")], {}),
    (
        [
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/{name}"),
            ("POST", "/v1/sessions/{id}/reward"),
            ("GET", "/v1/sessions/{id}"),
            ("DELETE", "/v1/sessions/{id}"),
            ("POST", "/v1/session_keys"),
            ("GET", "/health"),
        ],
        {**CHAT, **REWARD, **KEY},
    ),
)


async def _answer(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Status line and the rest of an answer; empty where the listener closes the connection, or waits for the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()
    try:
        writer.write(request)
        async with asyncio.timeout(PATIENCE_S):
            while block := await reader.read(65536):
                answer += block
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()
    status, _, rest = bytes(answer).partition(b"\r\n")
    return status, rest


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
async def test_nonsense_to_every_route_crashes_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    numbers = random.Random(SEED)
    fuzzers = [HttpFuzzer(SEED + at, routes, fields) for at, (routes, fields) in enumerate(LISTENERS)]
    codes: Counter[bytes] = Counter()
    async with watched_server("tests.helpers.fuzzing.http_server", tmp_path, str(tmp_path)) as server:

        async def send(at: int, caller: str) -> None:
            token = CALLERS[caller]
            request = fuzzers[at].request({} if token is None else {"Authorization": f"Bearer {token}"})
            status, rest = await _answer(server.ports[at], request)
            codes[status[:12]] += 1
            assert b" 500 " not in status, (status, request[:3000], rest)
            assert b"Traceback" not in rest, request[:3000]

        settled = None
        numbers_left = iter(range(NUM_INPUTS))

        async def send_one_after_another() -> None:
            nonlocal settled
            for number in numbers_left:
                # What is imported, cached and pooled at first is no growth.
                if number == NUM_INPUTS // 4:
                    settled = server.rss_bytes
                await send(number % len(LISTENERS), numbers.choice(list(CALLERS)))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(send_one_after_another())
        assert settled is not None
        growth = server.rss_bytes - settled
        print(f"{NUM_INPUTS} inputs, {growth / 2**20:.1f} MiB grown, {dict(codes)}")
        assert growth < MAX_GROWTH_BYTES
    assert "Traceback" not in (log := server.log.read_text()), log[-20000:]
