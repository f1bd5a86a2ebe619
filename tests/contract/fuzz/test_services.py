"""Malformed and hostile requests to every call of the reward, scheduler, trainer, weight and generator servers."""

from __future__ import annotations

import random
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from tests.helpers.broker_model.profile import IS_LONG, TIMEOUT_S
from tests.helpers.fuzzing.grpc_requests import Fuzzer, answer, methods
from tests.helpers.fuzzing.services import SERVICES, make_services, valid_requests
from tests.helpers.serving import channel_to

pytestmark = pytest.mark.slow

NUM_ROUNDS = [1000] if IS_LONG else [4, pytest.param(20, marks=pytest.mark.grid)]
SEED = random.randrange(1 << 32) if IS_LONG else 21


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("num_rounds", NUM_ROUNDS)
@pytest.mark.parametrize("method", methods(*SERVICES), ids=lambda method: method.name)
async def test_nonsense_is_refused_with_a_reason(
    method: MethodDescriptor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rounds: int
) -> None:
    monkeypatch.chdir(tmp_path)
    print(f"seed {SEED}")
    fuzzer = Fuzzer(SEED, names=("r", "n", "g"))
    async with channel_to(*make_services()) as channel:
        for _ in range(num_rounds):
            for request in fuzzer.requests(method, valid_requests(method)):
                await answer(channel, method, request)
        assert await answer(channel, method, b"\xff\xff") == grpc.StatusCode.INVALID_ARGUMENT
