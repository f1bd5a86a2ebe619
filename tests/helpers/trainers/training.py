"""A trainer's server, configuration and data for tests, over real gRPC and real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock.clock import Clock
from penstock.network.rpc import Server, open_channel, service_of
from penstock.security import NO_SECURITY
from penstock.v1 import trainer_pb2, trainer_pb2_grpc, weights_pb2_grpc
from services.trainer.config import TrainingConfig
from services.trainer.folders.allowed_roots import Roots
from services.trainer.folders.kept_run import KeptRun
from services.trainer.publishing.publisher import serving_weights
from services.trainer.publishing.version_store import WeightStore, WeightStoreService
from services.trainer.run.context import Policy, RunSpec
from services.trainer.run.policy_loading import load_policy
from services.trainer.run.training_run import TrainingRun
from services.trainer.service import TrainerService
from tests.helpers.weights.broadcasting import gloo_broadcasts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrainer:
    """A trainer that serves, and stubs to it."""

    server: Server
    channel: grpc.aio.Channel
    service: TrainerService
    store: WeightStore
    trainer: trainer_pb2_grpc.TrainerServiceAsyncStub
    weights: weights_pb2_grpc.WeightStoreServiceAsyncStub
    weights_url: str

    @property
    def run(self) -> TrainingRun:
        """The run of the trainer."""
        assert self.service._run is not None
        return self.service._run

    async def start(self, document: dict, *, run_id: str = "r", resume: bool = False) -> str:
        request = trainer_pb2.StartRunRequest(run_id=run_id, config_json=json.dumps(document), resume=resume)
        return (await self.trainer.StartRun(request, timeout=10)).run_dir

    async def events(self, *, run_id: str = "r", timeout_s: float = 40) -> list[trainer_pb2.WatchRunResponse]:
        """All events up to the run's end."""
        request = trainer_pb2.WatchRunRequest(run_id=run_id)
        return [event async for event in self.trainer.WatchRun(request, timeout=timeout_s)]


@asynccontextmanager
async def running_trainer(
    *,
    load: Callable[[TrainingConfig], Policy] = load_policy,
    security=NO_SECURITY,
    kept: KeptRun | None = None,
    clock: Clock | None = None,
    roots: Roots | None = None,
    is_broadcasting: bool = False,
) -> AsyncIterator[RunningTrainer]:
    store = WeightStore()
    async with AsyncExitStack() as resources:
        url = await resources.enter_async_context(serving_weights(store, listen="127.0.0.1:0", security=security))
        broadcasts = None
        if is_broadcasting:
            broadcasts = gloo_broadcasts(store)
            resources.push_async_callback(broadcasts.close)

        def make_run(spec: RunSpec) -> TrainingRun:
            return TrainingRun(spec, store=store, weights_url=url, load_policy=load, security=security, clock=clock)

        service = TrainerService(make_run=make_run, weights_url=url, kept=kept, roots=roots or Roots([Path("/")]))
        weights = WeightStoreService(store, broadcasts=broadcasts)
        server = Server(
            listen="127.0.0.1:0",
            services=[
                service_of(service),
                service_of(weights),
            ],
        )
        service.stopping = weights.stopping = server.stopping
        port = await server.start()
        service.resume_kept()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            try:
                yield RunningTrainer(
                    server=server,
                    channel=channel,
                    service=service,
                    store=store,
                    trainer=trainer_pb2_grpc.TrainerServiceStub(channel),
                    weights=weights_pb2_grpc.WeightStoreServiceStub(channel),
                    weights_url=url,
                )
            finally:
                server.stopping.set()
                await service.stop(timeout_s=20)
                await server.stop(grace_s=0.2)


async def run_alone(document: dict, *, run_id: str = "r", resume: bool = False) -> Path:
    """A whole run in this process, with nobody to ask for it; its folder, whose summary says how it ended."""
    config = TrainingConfig.model_validate(document)
    spec = RunSpec(run_id=run_id, config=config, run_dir=config.run.dir / run_id, resume=resume)
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    store = WeightStore()
    async with serving_weights(store, listen="127.0.0.1:0", security=NO_SECURITY) as url:
        run = TrainingRun(spec, store=store, weights_url=url, load_policy=load_policy, security=NO_SECURITY)
        await run.run()
    return spec.run_dir


def write_rows(path: Path, num_rows: int) -> Path:
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i} for i in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run_document(folder: Path, model: Path, broker: str, **run: object) -> dict:
    """A small run: 2 prompts of 4 samples a step."""
    return {
        "run": {"dir": str(folder / "runs"), "num_steps": 3, "num_eval_prompts": 4, "seed": 7, **run},
        "model": {"path": str(model)},
        "data": {
            "train": str(write_rows(folder / "train.jsonl", 10)),
            "eval": str(write_rows(folder / "eval.jsonl", 6)),
        },
        "sampling": {"max_new_tokens": 16},
        "algorithm": {"group_size": 4, "prompts_per_step": 2, "max_staleness": 1},
        "optimizer": {"learning_rate": 1e-3},
        "broker": broker,
    }
