"""Nonsense to every call in every role: the server goes on, answers in words, and does not grow."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from penstock.network.rpc import open_channel
from penstock.security import Security
from penstock.security.roles import allowed_roles, role_name
from tests.helpers.broker_model.profile import IS_LONG, TIMEOUT_S
from tests.helpers.brokers.broker import RUN
from tests.helpers.fuzzing.grpc_requests import CALL_TIMEOUT_S, STATED_CODES, Fuzzer, answer, methods
from tests.helpers.fuzzing.server import TOKENS
from tests.helpers.fuzzing.services import BROKER_SERVICES, SERVICES, broker_requests, valid_requests
from tests.helpers.fuzzing.watched_server import watched_server

NUM_INPUTS = 100_000 if IS_LONG else 1_000
SEED = random.randrange(1 << 32) if IS_LONG else 22
AT_ONCE = 64 if IS_LONG else 16
MAX_GROWTH_BYTES = 20 * 1024 * 1024
METHODS = methods(*BROKER_SERVICES, *SERVICES)
NO_TOKEN, WRONG_TOKEN = "nobody", "a wrong token"
CALLERS: dict[str, str | None] = {**TOKENS, NO_TOKEN: None, WRONG_TOKEN: "operator:fedcba9876543210"}

REFUSALS = dict.fromkeys((NO_TOKEN, WRONG_TOKEN), grpc.StatusCode.UNAUTHENTICATED)
MAY = STATED_CODES - {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED} | {grpc.StatusCode.OK}


def _inputs(fuzzer: Fuzzer, num_inputs: int) -> list[tuple[str, MethodDescriptor, bytes]]:
    """Every call in every role by turns, each time with another kind of nonsense."""
    valid: dict[str, list[Message]] = {**broker_requests(), **{m.name: valid_requests(m) for m in methods(*SERVICES)}}
    found: list[tuple[str, MethodDescriptor, bytes]] = []
    while len(found) < num_inputs:
        for method in METHODS:
            for caller in CALLERS:
                kinds = list(fuzzer.requests(method, valid[method.name][:1]))
                found.append((caller, method, kinds[len(found) % len(kinds)]))
    return found[:num_inputs]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
async def test_nonsense_in_every_role_crashes_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    # A deletion in due form takes the run away, and rightly so; the operator's calls know no run's name.
    inputs = _inputs(Fuzzer(SEED, names=(RUN, "a", "g", "other")), NUM_INPUTS)
    codes: Counter[grpc.StatusCode] = Counter()
    async with watched_server("tests.helpers.fuzzing.server", tmp_path) as server, AsyncExitStack() as stack:
        channels = {
            caller: await stack.enter_async_context(
                open_channel(f"127.0.0.1:{server.ports[0]}", Security(token=token, allows_plain=True))
            )
            for caller, token in CALLERS.items()
        }

        async def send(caller: str, method: MethodDescriptor, request: bytes) -> None:
            may = caller == "operator" or caller in {role_name(role) for role in allowed_roles(method)}
            code = await answer(channels[caller], method, request, **({} if may else {"patience_s": CALL_TIMEOUT_S}))
            codes[code] += 1
            assert code in (MAY if may else {REFUSALS.get(caller, grpc.StatusCode.PERMISSION_DENIED)}), (
                f"{method.name} by {caller}: {code}"
            )

        settled = None
        for start in range(0, len(inputs), AT_ONCE):
            await asyncio.gather(*(send(*each) for each in inputs[start : start + AT_ONCE]))
            # What is imported, cached and pooled at first is no growth.
            if settled is None and start >= len(inputs) // 4:
                settled = server.rss_bytes
        assert settled is not None
        growth = server.rss_bytes - settled
        print(f"{len(inputs)} inputs, {growth / 2**20:.1f} MiB grown, {dict(codes)}")
        assert growth < MAX_GROWTH_BYTES
    assert "Traceback" not in server.log.read_text()
