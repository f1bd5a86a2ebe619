"""The calls of a critic's own process: whom it serves, and what it says while it ends."""

from __future__ import annotations

import asyncio
import math

import pytest

from penstock import tracing
from penstock.clients.critic import CriticClient
from penstock.errors import RunConflictError, ServiceUnavailableError, UnknownRunError
from penstock.network.rpc import service_of
from penstock.v1 import critic_pb2
from penstock.wire.codec import float32_array
from services.trainer.batches.critic_packs import decoded_pack
from services.trainer.critic.service import CriticService
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.run.critic_link import CriticLink
from tests.helpers.serving import channel_to
from tests.helpers.traces import spans_in, tracing_to
from tests.helpers.trainers.critics import POISON, critic_packs, make_critic, opening

PLACE = critic_pb2.CriticPlace(epoch=1)
EVALUATE = critic_pb2.EvaluatePackRequest(run_id="r", place=PLACE, pack=critic_packs(1)[0])


@pytest.fixture
def critic(tmp_path):
    return make_critic(tmp_path / "critic")


async def test_it_is_opened_by_its_own_run_and_answers_with_values(critic):
    service = CriticService("r", critic)
    with pytest.raises(UnknownRunError):
        await service.EvaluatePack(EVALUATE, None)
    other = opening()
    other.run_id = "other"
    with pytest.raises(RunConflictError, match="this critic serves run 'r'; start one with that run_id"):
        await service.OpenCritic(other, None)
    await service.OpenCritic(opening(), None)
    answer = await service.EvaluatePack(EVALUATE, None)
    assert float32_array(answer.values, "values").tolist() == [0.0] * 4


async def test_one_that_ends_sends_its_trainer_to_its_next_process(critic, tmp_path):
    service = CriticService("r", critic)
    await service.OpenCritic(opening(), None)
    await service.close()
    with pytest.raises(ServiceUnavailableError, match="the critic is ending"):
        await service.EvaluatePack(EVALUATE, None)
    following = CriticService("r", make_critic(tmp_path / "critic"))
    await following.OpenCritic(opening(), None)
    await following.EvaluatePack(EVALUATE, None)


async def test_a_step_is_confirmed_before_it_is_taken(critic, monkeypatch):
    service = CriticService("r", critic)
    await service.OpenCritic(opening(), None)
    begun, may_end, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    step = critic._model.step

    def slow_step(**settings):
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(timeout=30)
        step(**settings)

    monkeypatch.setattr(critic._model, "step", slow_step)
    await service.AccumulateGradient(
        critic_pb2.AccumulateGradientRequest(run_id="r", place=PLACE, gradient_id=1, pack=critic_packs(1)[0]), None
    )
    request = critic_pb2.StepCriticRequest(
        run_id="r", place=PLACE, gradient_id=1, num_packs=1, rate_factor=1.0, is_last=True
    )
    await service.StepCritic(request, None)
    await begun.wait()
    evaluating = asyncio.ensure_future(
        service.EvaluatePack(
            critic_pb2.EvaluatePackRequest(
                run_id="r", place=critic_pb2.CriticPlace(epoch=1, policy_version=1), pack=critic_packs(1)[0]
            ),
            None,
        )
    )
    may_end.set()
    assert any(float32_array((await evaluating).values, "values"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError("disk full"), ServiceUnavailableError), (UnsupportedModelError("no"), RunConflictError)],
)
async def test_a_disk_may_be_mended_and_a_model_does_not_change(critic, monkeypatch, error, kind):
    def fail(place):
        raise error

    monkeypatch.setattr(critic._kept, "model_at", fail)
    with pytest.raises(kind, match=str(error)):
        await CriticService("r", critic).OpenCritic(opening(), None)


async def test_what_it_computes_is_a_part_of_the_step_that_its_trainer_takes(critic, tmp_path):
    step, loop = tracing.step_context("r", 1, 0), asyncio.get_running_loop()
    size = {"vocab_size": 32, "max_sequence_length": 16}
    packs = [decoded_pack(pack, **size, is_trained_on=True) for pack in critic_packs(2)]
    with tracing_to(tmp_path, ratio=1.0):
        async with (
            channel_to(service_of(CriticService("r", critic))) as channel,
            CriticClient(channel, opening(), patience_s=5) as client,
        ):
            await client.open()
            link = CriticLink(client, loop=loop, check=lambda: None, keep_checkpoints=1, step_span=lambda: step)
            await asyncio.to_thread(lambda: link.wait_for(link.begin_gradient(packs)))
            await asyncio.to_thread(link.step, rate_factor=1.0, is_last=True)
    opened, *parts = spans_in(tmp_path)
    assert (opened.name, opened.span.get("parentSpanId")) == ("rl.critic.open", None)
    assert [each.name for each in parts] == ["rl.critic.accumulate", "rl.critic.accumulate", "rl.critic.step"]
    assert {each.span["parentSpanId"] for each in parts} == {f"{step.span_id:016x}"}


async def test_a_trainer_of_several_processes_gives_up_a_gradient_at_its_first_bad_pack(critic):
    good, poisoned = critic_packs(2), critic_packs(1, first_token=POISON)
    async with (
        channel_to(service_of(CriticService("r", critic))) as channel,
        CriticClient(channel, opening(), patience_s=5) as client,
    ):
        await client.open()
        assert await client.accumulate(good) == 30
        assert math.isnan(await client.accumulate([*poisoned, *good]))
        await client.discard()
        assert await client.accumulate(good) == 30
        await client.step(rate_factor=1.0, is_last=False)
        assert client.minibatch == 1
