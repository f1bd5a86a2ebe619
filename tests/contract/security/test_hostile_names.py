"""Names that clients send, over real gRPC: what could be a path, or lead to another run's keys, is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from penstock.errors import PenstockError, from_rpc_error
from penstock.network.rpc import service_of
from penstock.v1 import broker_pb2, scheduler_pb2, trainer_pb2
from services.broker.storage.memory_store import MemoryStore
from services.scheduler.config import LengthsConfig
from services.scheduler.server import make_forecaster
from services.scheduler.service import SchedulerServicer
from services.trainer.folders.allowed_roots import Roots
from services.trainer.folders.kept_run import Kept, KeptRun
from tests.helpers.brokers.broker import limits, serving
from tests.helpers.fuzzing.grpc_requests import methods
from tests.helpers.serving import channel_to
from tests.helpers.trainers.training import run_document, running_trainer

NO_RUN_IDS = (".", "..", "...", "", "../up", "/etc", "a/b", "a\\b", "a\0b", "{r}:run", "r\n", "x" * 65, "\u0661")
LOOK_UPS = {"GetPlan", "WatchPlan", "GetLengthModel"}
"""They find nothing under such a name, and make nothing of it."""


def calls_with_run_ids(module: object, service: str) -> list[MethodDescriptor]:
    return [
        method
        for method in methods(module.DESCRIPTOR.services_by_name[service])
        if "run_id" in _fields(method) or "hello" in _fields(method)
    ]


def _fields(method: MethodDescriptor) -> set[str]:
    return {field.name for field in method.input_type.fields}


def request_for(method: MethodDescriptor, run_id: str) -> Message:
    request = GetMessageClass(method.input_type)()
    target = request if "run_id" in _fields(method) else request.hello
    target.run_id = run_id
    if isinstance(request, broker_pb2.OpenRunRequest):
        request.limits.CopyFrom(limits())
    return request


async def refusal(channel: grpc.aio.Channel, method: MethodDescriptor, request: Message) -> PenstockError:
    """What the call says to that one request."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    response = GetMessageClass(method.output_type).FromString
    make = getattr(channel, kind)(path, response_deserializer=response)
    data = request.SerializeToString()
    call = make(iter([data]) if method.client_streaming else data, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (anext(aiter(call)) if method.server_streaming else call)
    return from_rpc_error(caught.value, peer="server")


@pytest.mark.parametrize("method", calls_with_run_ids(broker_pb2, "BrokerService"), ids=lambda method: method.name)
async def test_the_broker_takes_no_run_id_that_is_not_one_plain_name(method: MethodDescriptor) -> None:
    async with serving(MemoryStore()) as broker:
        for run_id in NO_RUN_IDS:
            error = await refusal(broker.channel, method, request_for(method, run_id))
            assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "run_id"), (run_id, error)
        assert not (await broker.call("ListRuns", broker_pb2.ListRunsRequest())).run_ids


@pytest.mark.parametrize(
    "method", calls_with_run_ids(scheduler_pb2, "SchedulerService"), ids=lambda method: method.name
)
async def test_the_scheduler_takes_no_run_id_that_is_not_one_plain_name(method: MethodDescriptor) -> None:
    lengths = make_forecaster(LengthsConfig(), clock=ManualClock(), registry=CollectorRegistry())
    scheduler = SchedulerServicer(clock=ManualClock(), heartbeat_interval_s=5.0, lengths=lengths)
    async with channel_to(service_of(scheduler)) as channel:
        for run_id in NO_RUN_IDS:
            error = await refusal(channel, method, request_for(method, run_id))
            expected = "UNKNOWN_RUN" if method.name in LOOK_UPS else "INVALID_FIELD"
            assert error.reason == expected, (run_id, error)


@pytest.fixture
def fenced(tmp_path: Path, model: Path) -> tuple[Roots, dict]:
    """Roots, and a run that keeps to them."""
    inside = tmp_path / "inside"
    inside.mkdir()
    return Roots([inside, model]), run_document(inside, model, "127.0.0.1:9")


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


async def start(trainer: object, document: dict, run_id: str = "r") -> PenstockError:
    request = trainer_pb2.StartRunRequest(run_id=run_id, config_json=json.dumps(document))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await trainer.trainer.StartRun(request, timeout=10)
    return from_rpc_error(caught.value, peer="trainer")


async def test_a_run_that_is_started_names_nothing_outside_the_trainers_roots(
    tmp_path: Path, fenced: tuple[Roots, dict]
) -> None:
    roots, document = fenced
    outside = tmp_path / "outside"
    (outside / "model").mkdir(parents=True)
    (outside / "model" / "config.json").write_text("{}")
    (outside / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "inside" / "link").symlink_to(outside)
    before = everything_in(tmp_path)
    cases = [
        ("run.dir", {"run": {"dir": str(outside)}}),
        ("run.dir", {"run": {"dir": str(tmp_path / "inside" / "link")}}),
        ("run.dir", {"run": {"dir": str(tmp_path / "inside" / ".." / "outside")}}),
        ("model.path", {"model": {"path": str(outside / "model")}}),
        ("data.train", {"data": {"train": str(outside / "rows.jsonl")}}),
        ("data.eval", {"data": {**document["data"], "eval": str(tmp_path / "inside" / "link" / "rows.jsonl")}}),
    ]
    async with running_trainer(roots=roots) as trainer:
        for field, changes in cases:
            error = await start(trainer, document | changes)
            assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", field), error
            assert "allowed_roots" in str(error)
        for run_id in NO_RUN_IDS:
            assert (await start(trainer, document, run_id)).metadata["field"] == "run_id"
    assert everything_in(tmp_path) == before


async def test_a_run_that_was_kept_is_not_resumed_outside_the_roots(tmp_path: Path, fenced: tuple[Roots, dict]) -> None:
    roots, document = fenced
    outside = tmp_path / "outside"
    kept = KeptRun(tmp_path / "trainer.json")
    text = json.dumps(document | {"run": {"dir": str(outside)}})
    kept.write(Kept(run_id="r", config_json=text, num_begins=0))
    async with running_trainer(roots=roots, kept=kept) as trainer:
        found = await trainer.trainer.GetTrainer(trainer_pb2.GetTrainerRequest(), timeout=10)
    assert found.state == trainer_pb2.TRAINER_STATE_IDLE
    assert outside not in everything_in(tmp_path)


@pytest.mark.parametrize(
    "broker", ["unix:/run/docker.sock", "unix-abstract:x", "dns://10.0.0.1/broker:7301", "a:1,unix:///x", "a", "a:0"]
)
async def test_a_run_that_is_started_names_a_broker_by_host_and_port_alone(
    fenced: tuple[Roots, dict], broker: str
) -> None:
    roots, document = fenced
    async with running_trainer(roots=roots) as trainer:
        error = await start(trainer, document | {"broker": broker})
    assert error.reason == "INVALID_FIELD"
    assert "broker: must be host:port" in str(error)


async def test_a_run_within_the_roots_begins(fenced: tuple[Roots, dict]) -> None:
    roots, document = fenced
    async with running_trainer(roots=roots) as trainer:
        run_dir = await trainer.start(document)
    assert run_dir == f"{document['run']['dir']}/r"
