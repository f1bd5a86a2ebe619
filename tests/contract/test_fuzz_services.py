"""Malformed and hostile requests to every call of the reward, scheduler, trainer, weight and generator servers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from penstock.clients.inventory import this_machine
from penstock.clock import ManualClock
from penstock.errors import InvalidFieldError
from penstock.rewards.serving import reward_service
from penstock.rpc import Service
from penstock.v1 import (
    generator_pb2,
    generator_pb2_grpc,
    reward_pb2,
    scheduler_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    types_pb2,
    weights_pb2,
    weights_pb2_grpc,
)
from services.generator.engine import UpdateMode
from services.generator.server import SERVICE_NAME as GENERATOR_NAME
from services.generator.service import GeneratorServicer
from services.reward.models.build import build_model
from services.scheduler.config import LengthsConfig
from services.scheduler.server import make_forecaster, make_service
from services.scheduler.service import SchedulerServicer
from services.trainer.service import SERVICE_NAME as TRAINER_NAME
from services.trainer.service import TrainerService
from services.trainer.weight_store import SERVICE_NAME as WEIGHTS_NAME
from services.trainer.weight_store import WeightStore, WeightStoreService
from tests.helpers.broker_model.profile import IS_LONG, TIMEOUT_S
from tests.helpers.fuzz import Fuzzer, answer, methods
from tests.helpers.serving import channel_to

NUM_ROUNDS = 1000 if IS_LONG else 20
SEED = random.randrange(1 << 32) if IS_LONG else 21
SERVICES = [
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (reward_pb2, "RewardService"),
        (scheduler_pb2, "SchedulerService"),
        (trainer_pb2, "TrainerService"),
        (weights_pb2, "WeightStoreService"),
        (generator_pb2, "GeneratorService"),
    )
]


class StillGenerator:
    """A generator that does nothing: what is tested is what stands before it."""

    update_mode = UpdateMode.KEEP

    def view(self) -> generator_pb2.GetGeneratorResponse:
        return generator_pb2.GetGeneratorResponse()

    def drain(self, grace_s: float | None) -> bool:
        return grace_s is None or grace_s >= 0

    async def pause(self, is_paused: bool) -> None:
        pass

    async def pull(self, policy_version: int | None, mode: int) -> NoReturn:
        raise InvalidFieldError("no such version", field="policy_version")


def _refuse(spec: Any) -> NoReturn:
    raise InvalidFieldError("no run begins in this test", field="run_id")


def _services() -> list[Service]:
    trainer = TrainerService(make_run=_refuse, weights_url="http://127.0.0.1:1")
    weights = WeightStoreService(WeightStore())
    lengths = make_forecaster(LengthsConfig(), clock=ManualClock(), registry=CollectorRegistry())
    scheduler = SchedulerServicer(clock=ManualClock(), heartbeat_interval_s=5.0, lengths=lengths)
    return [
        reward_service(build_model("exact_match")),
        make_service(scheduler),
        Service(name=TRAINER_NAME, add=trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer=trainer),
        Service(name=WEIGHTS_NAME, add=weights_pb2_grpc.add_WeightStoreServiceServicer_to_server, servicer=weights),
        Service(
            name=GENERATOR_NAME,
            add=generator_pb2_grpc.add_GeneratorServiceServicer_to_server,
            servicer=GeneratorServicer(StillGenerator()),
        ),
    ]


def _valid(method: MethodDescriptor) -> list[Message]:
    """An honest request, where its damaged forms say more than any values do."""
    key = types_pb2.SampleKey(group_id="g", sample_index=0)
    known: dict[str, Message] = {
        "Score": reward_pb2.ScoreRequest(
            items=[reward_pb2.ScoreItem(key=key, completion_text="2", answer="2", metadata_json="{}")]
        ),
        "RegisterNode": scheduler_pb2.RegisterNodeRequest(node=this_machine(node_id="n")),
        "CreatePlan": scheduler_pb2.CreatePlanRequest(run_id="r", num_generators=2),
        "StartRun": trainer_pb2.StartRunRequest(run_id="r", config_json="{}"),
        "DrainGenerator": generator_pb2.DrainGeneratorRequest(grace=Duration(seconds=1)),
    }
    return [known[method.name]] if method.name in known else []


@asynccontextmanager
async def serving_all() -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(*_services()) as channel:
        yield channel


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("method", methods(*SERVICES), ids=lambda method: method.name)
async def test_nonsense_is_refused_with_a_reason(
    method: MethodDescriptor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    print(f"seed {SEED}")
    fuzzer = Fuzzer(SEED, names=("r", "n", "g"))
    async with serving_all() as channel:
        for _ in range(NUM_ROUNDS):
            for request in fuzzer.requests(method, _valid(method)):
                await answer(channel, method, request)
        assert await answer(channel, method, b"\xff\xff") == grpc.StatusCode.INVALID_ARGUMENT
