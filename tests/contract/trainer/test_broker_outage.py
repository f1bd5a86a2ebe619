"""A trainer whose broker is away for longer than any limit of its own: it waits, says so, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.security import Security
from penstock.v1 import trainer_pb2
from services.trainer.run import evaluation, loop
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.proxies.tcp_proxy import TcpProxy, proxy_to
from tests.helpers.serving import serving
from tests.helpers.trainers.training import RunningTrainer, run_document, running_trainer
from tests.helpers.waiting import until

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

LIMIT_S = 1.0


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit that could end the run, scaled down."""
    monkeypatch.setattr(loop, "LEAST_SILENCE_S", LIMIT_S)
    monkeypatch.setattr(evaluation, "LEAST_SILENCE_S", LIMIT_S)
    monkeypatch.setattr("penstock.clients.broker.DEFAULT_PATIENCE_S", LIMIT_S, raising=False)
    monkeypatch.setattr("penstock.clients.export.DEFAULT_PATIENCE_S", LIMIT_S, raising=False)
    monkeypatch.setattr("penstock.network.outage.FIRST_NOTICE_S", 0.3, raising=False)


class VanishingBroker(ScriptedTrainingBroker):
    """Is cut off for good, until the link heals, when the trainer calls `method` for the `on_call`th time."""

    link: TcpProxy

    def __init__(self, method: str, on_call: int = 1) -> None:
        super().__init__()
        self._method, self._calls_left = method, on_call

    def _called(self, method: str) -> None:
        self._calls_left -= method == self._method
        if method == self._method and self._calls_left == 0:
            self.link.is_refusing = True
            self.link.cut()

    async def OpenRun(self, request, context):
        self._called("OpenRun")
        return await super().OpenRun(request, context)

    async def SubmitPrompts(self, request, context):
        self._called("SubmitPrompts")
        return await super().SubmitPrompts(request, context)

    async def AckStep(self, request, context):
        self._called("AckStep")
        return await super().AckStep(request, context)

    async def CloseRun(self, request, context):
        self._called("CloseRun")
        return await super().CloseRun(request, context)

    async def StreamMicrobatches(self, request_iterator, context):
        self._called("StreamMicrobatches")
        async for response in super().StreamMicrobatches(request_iterator, context):
            yield response


@asynccontextmanager
async def behind_a_link(broker: VanishingBroker) -> AsyncIterator[tuple[TcpProxy, RunningTrainer]]:
    async with serving(broker.service()) as (server, _), proxy_to(server.port) as link, running_trainer() as trainer:
        broker.link = link
        yield link, trainer


async def outlast_the_limits(trainer: RunningTrainer) -> None:
    """Returns when the broker was missed for three times the limit; the run must say so and not end meanwhile."""
    await until(
        lambda: "waiting for broker" in trainer.run.events.message or trainer.run.events.is_finished, timeout_s=30
    )
    begun_s = asyncio.get_running_loop().time()
    await until(
        lambda: asyncio.get_running_loop().time() - begun_s > 3 * LIMIT_S or trainer.run.events.is_finished,
        timeout_s=30,
    )
    assert not trainer.run.events.is_finished, trainer.run.events.message
    assert " since 20" in trainer.run.events.message


@pytest.mark.parametrize(
    ("method", "on_call"),
    [
        ("OpenRun", 1),
        ("SubmitPrompts", 1),
        ("StreamMicrobatches", 1),
        ("StreamMicrobatches", 2),
        ("AckStep", 1),
        ("CloseRun", 1),
    ],
    ids=["opening", "submitting", "evaluating", "training", "acknowledging", "closing"],
)
async def test_a_broker_that_is_away_ends_no_run(tmp_path, model, method: str, on_call: int) -> None:
    broker = VanishingBroker(method, on_call)
    async with behind_a_link(broker) as (link, trainer):
        await trainer.start(run_document(tmp_path, model, link.address))
        await outlast_the_limits(trainer)
        link.heal()
        finished = (await trainer.events())[-1].finished
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    assert broker.books().balanced
    assert sorted(broker.trained.values()) == [1, 1, 2, 2, 3, 3]


async def test_how_long_to_wait_is_a_setting_of_the_run(tmp_path, model) -> None:
    async with behind_a_link(VanishingBroker("AckStep")) as (link, trainer):
        await trainer.start(run_document(tmp_path, model, link.address, patience_s=1.0))
        finished = (await trainer.events())[-1].finished
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert "broker 127.0.0.1" in finished.message


@pytest.mark.parametrize("method", ["SubmitPrompts", "AckStep"])
async def test_a_stop_while_waiting_ends_within_seconds_with_a_checkpoint(tmp_path, model, method: str) -> None:
    async with behind_a_link(VanishingBroker(method)) as (link, trainer):
        run_dir = tmp_path / "runs" / "r"
        await trainer.start(run_document(tmp_path, model, link.address))
        await outlast_the_limits(trainer)
        begun_s = asyncio.get_running_loop().time()
        await trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=5)
        finished = (await trainer.events())[-1].finished
        assert asyncio.get_running_loop().time() - begun_s < 15
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_STOPPED
    assert (run_dir / "checkpoints" / f"step_{int(method == 'AckStep')}").is_dir()


async def test_a_wrong_token_is_an_error_at_once(tmp_path, model) -> None:
    broker = ScriptedTrainingBroker()
    async with (
        serving(broker.service(), security=Security(token="right", allows_plain=True)) as (_, target),
        running_trainer(security=Security(token="wrong", allows_plain=True)) as trainer,
    ):
        await trainer.start(run_document(tmp_path, model, target))
        finished = (await trainer.events())[-1].finished
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert "token" in finished.message
