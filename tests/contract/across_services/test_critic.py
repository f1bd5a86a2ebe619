"""A critic in its own service: losses and weights are those of the critic in the trainer, whoever is started again."""

from __future__ import annotations

import asyncio
import json
import shutil
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from penstock.network import outage
from penstock.network.rpc import Server, service_of
from penstock.v1 import trainer_pb2, types_pb2
from penstock.wire.codec import float32_bytes, int32_bytes
from services.trainer.critic.config import CriticConfig
from services.trainer.critic.critic_run import CriticRun
from services.trainer.critic.service import CriticService
from services.trainer.critic.trained_critic import TrainedCritic
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker, scored_group
from tests.helpers.ports import free_addresses
from tests.helpers.serving import serving
from tests.helpers.trainers.training import run_alone, run_document, running_trainer
from tests.helpers.waiting import until

pytestmark = pytest.mark.usefixtures("one_thread")
RUN, NUM_STEPS = "r", 4


class MortalCritic(CriticService):
    """Dies in the middle of calls, counted by method from 1, and so takes its process with it."""

    def __init__(self, critic: CriticRun, deaths: set[tuple[str, int]], counts: dict[str, int]) -> None:
        super().__init__(RUN, critic)
        self.dying = asyncio.Event()
        self._deaths, self._counts = deaths, counts

    async def AccumulateGradient(self, request, context):
        await self._count("accumulate")
        return await super().AccumulateGradient(request, context)

    async def StepCritic(self, request, context):
        response = await super().StepCritic(request, context)
        await self._count("step")
        return response

    async def _count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1
        if (what, self._counts[what]) in self._deaths:
            self.num_packs_lost = len(self._critic._answers)
            self.dying.set()
            await asyncio.Event().wait()


@asynccontextmanager
async def critic_host(
    model: Path,
    state_dir: Path,
    *,
    deaths: set[tuple[str, int]] = frozenset(),
    every: int = 2,
    is_revived: bool = True,
    moves: bool = False,
) -> AsyncIterator[tuple[str, list[MortalCritic]]]:
    """A critic that is started again as often as it dies, if `is_revived`, its address, and those that lived.

    One that `moves` is started at the next of three addresses, in an empty folder there, with a storage for all.
    """
    config = CriticConfig(run_id=RUN, model_path=model, state_dir=state_dir)
    lives: list[MortalCritic] = []
    counts: dict[str, int] = {}
    started = asyncio.get_running_loop().create_future()
    places = free_addresses(3)

    async def live() -> None:
        listen = "127.0.0.1:0"
        while True:
            critic = CriticRun(
                state_dir / str(len(lives)) if moves else state_dir,
                make_model=lambda: TrainedCritic(config, model),
                checkpoint_every_steps=every,
                stored=f"file://{state_dir}/storage" if moves else None,
            )
            service = MortalCritic(critic, deaths, counts)
            server = Server(listen=places[len(lives)] if moves else listen, services=[service_of(service)])
            lives.append(service)
            listen = f"127.0.0.1:{await server.start()}"
            if not started.done():
                started.set_result(",".join(places) if moves else listen)
            try:
                await service.dying.wait()
            finally:
                await server.stop(grace_s=0)
                # As the end of its process does: its thread and its lock are gone, and nothing was finished.
                service._compute.close()
                critic.release()
            if not is_revived:
                return

    task = asyncio.create_task(live())
    try:
        yield await started, lives
    finally:
        task.cancel()
        await asyncio.wait([task])


def varied_group(prompt: types_pb2.Prompt, *, policy_version: int) -> types_pb2.TrajectoryGroup:
    """The same for the same prompt in every run, of 3 to 12 tokens a sample."""
    group = scored_group(prompt, policy_version=policy_version, num_tokens=12)
    for index, sample in enumerate(group.trajectories):
        rng = np.random.default_rng(zlib.crc32(f"{prompt.group_id}/{index}".encode()))
        size = int(rng.integers(3, 13))
        sample.token_ids = int32_bytes(rng.integers(5, 13, size=size))
        sample.behavior_logprobs = float32_bytes([-3.0] * size)
        sample.policy_versions.lengths = int32_bytes([size])
        sample.score.value = float(rng.integers(0, 2))
    return group


def ppo(folder: Path, model: Path, broker: str, **run: Any) -> dict[str, Any]:
    folder.mkdir()
    document = run_document(folder, model, broker, num_steps=NUM_STEPS, num_eval_prompts=0, **run)
    document["algorithm"] |= {"name": "ppo", "max_staleness": 0, "num_minibatches": 2, "kl_coefficient": 0.05}
    document["trainer"] = {"tokens_per_pack": 32}
    return document


async def trained(document: dict[str, Any], *, resume: bool = False) -> Path:
    broker = ScriptedTrainingBroker()
    broker.make_group = varied_group
    async with serving(broker.service()) as (_, target):
        return await run_alone(document | {"broker": target}, run_id=RUN, resume=resume)


def lines(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in each.items() if k.startswith(("loss/", "optimizer/grad_norm"))} for each in found]


def resumed(checkpoint: Path, prefix: str) -> dict[str, Any]:
    """Tensors of a checkpoint whose names begin so, without that prefix."""
    files = (load_file(path) for path in (checkpoint / "resume").glob("*.safetensors"))
    tensors = {name: tensor for each in files for name, tensor in each.items()}
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert one
    for name, tensor in one.items():
        np.testing.assert_allclose(tensor.numpy(), other[name].numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


async def test_a_critic_of_its_own_that_dies_and_moves_has_the_losses_and_weights_of_one_in_the_trainer(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies with half a gradient, and after it took a step that it has not confirmed, each time for good: the next
    one is on another machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    alone = await trained(ppo(tmp_path / "alone", model, ""))
    deaths = {("accumulate", 8), ("step", 5)}
    async with critic_host(model, tmp_path / "critic", deaths=deaths, moves=True) as (address, lives):
        document = ppo(tmp_path / "apart", model, "")
        document["algorithm"]["critic"] = "service"
        apart = await trained(document | {"critic": address})
        assert len(lives) == 3
        assert lives[0].num_packs_lost == 1
        lives[-1]._critic.finish()
    assert len(lines(apart)) == NUM_STEPS
    for one, other in zip(lines(alone), lines(apart), strict=True):
        assert {"loss/loss", "loss/value_loss"} <= one.keys()
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    own = alone / "checkpoints" / f"step_{NUM_STEPS}"
    assert_close(resumed(own, "weights/"), resumed(apart / "checkpoints" / f"step_{NUM_STEPS}", "weights/"))
    critics = tmp_path / "critic" / "storage" / f"step_{NUM_STEPS}"
    assert_close(resumed(own, "critic/weights/"), resumed(critics, "weights/"))
    assert_close(resumed(own, "critic/optimizer/"), resumed(critics, "optimizer/"))


async def test_a_trainer_that_goes_back_to_its_checkpoint_takes_its_critic_along(tmp_path: Path, model: Path) -> None:
    async with critic_host(model, tmp_path / "critic", every=3) as (address, _):
        document = ppo(tmp_path / "run", model, "", checkpoint_every_steps=2) | {"critic": address}
        document["algorithm"]["critic"] = "service"
        broker = ScriptedTrainingBroker()
        broker.make_group = varied_group
        async with serving(broker.service()) as (_, target):
            folder = await run_alone(document | {"broker": target}, run_id=RUN)
            first = lines(folder)
            # As if it had been killed before its last checkpoint was complete.
            shutil.rmtree(folder / "checkpoints" / "step_4")
            await run_alone(document | {"broker": target}, run_id=RUN, resume=True)
        assert json.loads((folder / "summary.json").read_text())["outcome"] == "completed"
        assert lines(folder)[:2] == first[:2]
        assert lines(folder)[2:] == [pytest.approx(line, rel=1e-6) for line in first[2:]]

        other = ppo(tmp_path / "other", model, "") | {"critic": address}
        other["algorithm"]["critic"] = "service"
        refused = await trained(other)
        message = json.loads((refused / "summary.json").read_text())["message"]
        assert f"state_dir: {tmp_path / 'critic'} holds the critic of run 'r'" in message


async def test_a_trainer_says_that_it_waits_for_its_critic_and_a_stop_ends_the_wait(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "FIRST_NOTICE_S", 0.2)
    broker = ScriptedTrainingBroker()
    broker.make_group = varied_group
    async with (
        critic_host(model, tmp_path / "critic", deaths={("accumulate", 1)}, is_revived=False) as (address, _),
        serving(broker.service()) as (_, target),
        running_trainer() as trainer,
    ):
        document = ppo(tmp_path / "run", model, target) | {"critic": address}
        document["algorithm"]["critic"] = "service"
        folder = Path(await trainer.start(document))
        await until(lambda: trainer.run.events.message.startswith(f"waiting for critic {address} since "))
        version = trainer.run.events.policy_version
        trainer.run.request_stop()
        events = await trainer.events()
    assert events[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_STOPPED
    assert (folder / "checkpoints" / f"step_{version}" / "COMPLETE").exists()
