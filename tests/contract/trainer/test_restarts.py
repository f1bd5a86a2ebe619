"""A trainer that its supervisor restarts goes on with its run by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.clients.broker import BrokerClient
from penstock.errors import InternalError
from penstock.v1 import broker_pb2, trainer_pb2
from services.trainer.folders.kept_run import KeptRun
from tests.helpers.brokers import broker as real_broker
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.serving import serving
from tests.helpers.stores.stores import RedisServers, opened_store
from tests.helpers.trainers.training import RunningTrainer, run_document, running_trainer
from tests.helpers.waiting import until

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture
def broker() -> ScriptedTrainingBroker:
    return ScriptedTrainingBroker()


@pytest.fixture
def kept(tmp_path: Path) -> KeptRun:
    return KeptRun(tmp_path / "state" / "trainer-7304.json", first_retry_s=0.2)


def steps_of(events: list[trainer_pb2.WatchRunResponse]) -> list[int]:
    return [event.step.policy_version for event in events if event.HasField("step")]


async def test_a_drained_trainer_writes_a_checkpoint_and_its_successor_goes_on(tmp_path, model, broker, kept) -> None:
    async with serving(broker.service()) as (_, target):
        document = run_document(tmp_path, model, target, num_steps=5, num_eval_prompts=0)
        async with running_trainer(kept=kept) as trainer:
            await trainer.start(document)
            await until(lambda: trainer.run.events.policy_version >= 2, timeout_s=60)
            watching = asyncio.create_task(trainer.events())
            trainer.server.stopping.set()
            await trainer.service.stop(timeout_s=30)
            drained = await watching
        assert drained[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_DRAINED
        done = steps_of(drained)[-1]
        assert (tmp_path / "runs" / "r" / "checkpoints" / f"step_{done}").is_dir()
        async with running_trainer(kept=kept) as trainer:
            # Nobody calls StartRun.
            events = await trainer.events()
        assert events[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, events[-1].finished.message
        assert steps_of(events) == list(range(done + 1, 6))
        assert events[0].incarnation != drained[0].incarnation
    assert kept.read() is None
    assert sorted(broker.trained.values()) == sorted(2 * [1, 2, 3, 4, 5])


async def test_a_restart_without_a_word_goes_on_from_the_newest_checkpoint(tmp_path, model, broker, kept) -> None:
    async with serving(broker.service()) as (_, target):
        document = run_document(
            tmp_path, model, target, num_steps=4, num_eval_prompts=0, checkpoint_every_steps=1, keep_checkpoints=9
        )
        async with running_trainer(kept=kept) as trainer:
            await trainer.start(document)
            await until(lambda: trainer.run.events.policy_version >= 2, timeout_s=60)
            as_kept = kept.read()
            assert as_kept is not None
            assert as_kept.num_begins == 0
        # As after a kill -9: what is kept is what was kept while it ran.
        kept.write(as_kept)
        async with running_trainer(kept=kept) as trainer:
            # Whoever asks for it again is answered with the run under way.
            assert await trainer.start(document, resume=True) == str(tmp_path / "runs" / "r")
            events = await trainer.events()
        assert events[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, events[-1].finished.message
        assert steps_of(events)[-1] == 4


async def test_a_run_that_ends_as_asked_is_not_begun_again(tmp_path, model, broker, kept) -> None:
    broker.is_handing_out = False
    async with serving(broker.service()) as (_, target), running_trainer(kept=kept) as trainer:
        await trainer.start(run_document(tmp_path, model, target))
        assert kept.read() is not None
        await until(lambda: len(broker.prompts) > 0, timeout_s=30)
        await trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=5)
        assert (await trainer.events())[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_STOPPED
        await until(lambda: kept.read() is None)


async def test_a_run_that_fails_is_tried_again_with_growing_delays_until_it_works(
    tmp_path, model, broker, kept, monkeypatch
) -> None:
    failures_left = [3]
    original = BrokerClient.get_run

    async def fails(*args, **kwargs):
        if failures_left[0]:
            failures_left[0] -= 1
            raise InternalError("scripted fault")
        return await original(*args, **kwargs)

    monkeypatch.setattr(BrokerClient, "get_run", fails)
    async with serving(broker.service()) as (_, target), running_trainer(kept=kept) as trainer:
        await trainer.start(run_document(tmp_path, model, target, num_eval_prompts=0))
        finishes: list[trainer_pb2.RunFinished] = []
        while not finishes or finishes[-1].HasField("retry_delay"):
            events = await trainer.events()
            finishes += [event.finished for event in events if event.HasField("finished")]
    assert finishes[-1].outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finishes[-1].message
    failed = finishes[:-1]
    assert {each.outcome for each in failed} == {trainer_pb2.RUN_OUTCOME_FAILED}
    assert all("scripted fault" in each.message for each in failed)
    assert all(each.retry_delay.ToMilliseconds() >= 200 for each in failed)
    assert broker.books().balanced


async def test_a_run_that_goes_on_has_no_summary_of_how_it_ended_before(tmp_path, model, broker) -> None:
    summary = tmp_path / "runs" / "r" / "summary.json"
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        document = run_document(tmp_path, model, target, num_steps=6, num_eval_prompts=0)
        await trainer.start(document)
        await until(lambda: broker.policy_version >= 1, timeout_s=60)
        broker.is_handing_out = False
        await trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=5)
        await trainer.events()
        assert json.loads(summary.read_text())["outcome"] == "stopped"
        await trainer.start(document, resume=True)
        await until(lambda: trainer.run.events.state == trainer_pb2.TRAINER_STATE_TRAINING, timeout_s=60)
        # A kill now leaves a folder without an end, as it is.
        assert not summary.exists()
        broker.is_handing_out = True
        await trainer.events()
    assert json.loads(summary.read_text())["outcome"] == "completed"


async def test_while_it_waits_it_says_why_and_begins_at_once_when_asked(tmp_path, model, broker, monkeypatch) -> None:
    kept = KeptRun(tmp_path / "trainer-7304.json", first_retry_s=600.0)
    original = BrokerClient.get_run

    async def broken(*_args, **_kwargs):
        raise InternalError("scripted fault")

    monkeypatch.setattr(BrokerClient, "get_run", broken)
    async with serving(broker.service()) as (_, target), running_trainer(kept=kept) as trainer:
        document = run_document(tmp_path, model, target, num_eval_prompts=0)
        await trainer.start(document)
        await until(lambda: "tries again in" in trainer.run.events.message, timeout_s=60)
        status = await trainer.trainer.GetTrainer(trainer_pb2.GetTrainerRequest(), timeout=5)
        assert "scripted fault; tries again in 600 s" in status.message
        monkeypatch.setattr(BrokerClient, "get_run", original)
        waiting = asyncio.create_task(trainer.events())
        await asyncio.sleep(0)
        await trainer.start(document, resume=True)
        events = await trainer.events()
        assert events[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, events[-1].finished.message
        await waiting


@pytest.mark.parametrize("reason", ["FENCED", "RUN_CONFLICT"])
async def test_a_run_that_another_try_would_only_harm_is_not_tried_again(
    tmp_path, model, broker, kept, monkeypatch, reason: str
) -> None:
    class RefusedError(InternalError):
        """As of a trainer that was taken over."""

    RefusedError.reason = reason

    async def refuse(*_args, **_kwargs):
        raise RefusedError("refused for good")

    monkeypatch.setattr("penstock.clients.broker.BrokerClient.open_run", refuse)
    async with serving(broker.service()) as (_, target), running_trainer(kept=kept) as trainer:
        await trainer.start(run_document(tmp_path, model, target))
        finished = (await trainer.events())[-1].finished
        assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
        assert not finished.HasField("retry_delay")
        await until(lambda: kept.read() is None)


@pytest.fixture
async def real(servers: RedisServers) -> AsyncIterator[real_broker.RunningBroker]:
    async with opened_store("memory", servers) as store, real_broker.serving(store) as running:
        yield running


async def _owner(broker: real_broker.RunningBroker) -> broker_pb2.RunOwner:
    runs = await broker.call("ListRuns", broker_pb2.ListRunsRequest())
    if "r" not in runs.run_ids:
        return broker_pb2.RunOwner()
    view: broker_pb2.GetRunResponse = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id="r"))
    return view.owner


async def _owned_at(broker: real_broker.RunningBroker, epoch: int) -> broker_pb2.RunOwner:
    async def is_owned() -> bool:
        return (await _owner(broker)).epoch == epoch

    await real_broker.eventually(is_owned, timeout_s=60)
    return await _owner(broker)


async def _take_over(broker: real_broker.RunningBroker, trainer: RunningTrainer, document: dict) -> None:
    """As another trainer that somebody started."""
    instance_id = (await _owner(broker)).instance_id
    async with BrokerClient(document["broker"]) as client:
        context = trainer.run.broker.context(client, trainer.run._progress)
        client.owner = broker_pb2.RunOwner(instance_id=instance_id, owner_id="another")
        await context.open_run(0, takes_over=True)


def _document(folder: Path, model: Path, broker: real_broker.RunningBroker, **run: object) -> dict:
    document = run_document(folder, model, f"127.0.0.1:{broker.server.port}", num_eval_prompts=0, **run)
    return document | {"policy": {"dispatch": "fifo"}}


@pytest.mark.parametrize("is_folder_shared", [False, True])
async def test_a_restart_does_not_take_the_run_from_a_trainer_that_took_it_over(
    tmp_path, model, real, kept, is_folder_shared: bool
) -> None:
    document = _document(tmp_path, model, real)
    folder = tmp_path / "runs" / "r"
    async with running_trainer(kept=kept) as trainer:
        await trainer.start(document)
        first = await _owned_at(real, 1)
        await until(lambda: (kept.read() or kept.present).epoch == 1, timeout_s=30)
        await _take_over(real, trainer, document)
        # As after a kill -9 of a trainer that was cut off: it never heard of the other.
        as_kept = kept.read()
    assert as_kept is not None
    assert (as_kept.owner_id, as_kept.epoch) == (first.owner_id, 1)
    kept.write(as_kept)
    if is_folder_shared:
        (folder / "instance.json").write_text(json.dumps({"instance_id": first.instance_id, "epoch": 2}))
    (folder / "metrics.jsonl").write_text('{"step/policy_version": 1}\n')
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    async with running_trainer(kept=kept) as trainer:
        finished = (await trainer.events())[-1].finished
        assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
        assert "fenced: trainer 'another' took run 'r' over" in finished.message
        assert "start it here to take it back" in finished.message
        assert not finished.HasField("retry_delay")
        await until(lambda: kept.read() is None)
        assert (await _owner(real)).owner_id == "another"
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
        # Somebody asks for it: that takes the run over, as ever.
        (folder / "metrics.jsonl").unlink()
        await trainer.start(document, resume=True)
        assert (await _owned_at(real, 3)).owner_id != "another"


async def test_a_restart_whose_take_over_was_not_answered_is_no_stranger(tmp_path, model, real, kept) -> None:
    document = _document(tmp_path, model, real)
    async with running_trainer(kept=kept) as trainer:
        await trainer.start(document)
        await _owned_at(real, 1)
        await until(lambda: kept.present.epoch == 1, timeout_s=30)
        as_kept = kept.present
    kept.write(replace(as_kept, epoch=0))
    async with running_trainer(kept=kept):
        assert (await _owned_at(real, 2)).owner_id != as_kept.owner_id


async def test_a_retry_does_not_take_the_run_from_a_trainer_that_took_it_over(
    tmp_path, model, real, monkeypatch
) -> None:
    kept = KeptRun(tmp_path / "trainer-7304.json", first_retry_s=1.0)
    document = _document(tmp_path, model, real)
    original = BrokerClient.get_run

    async def broken(*_args, **_kwargs):
        raise InternalError("scripted fault")

    monkeypatch.setattr(BrokerClient, "get_run", broken)
    async with running_trainer(kept=kept) as trainer:
        await trainer.start(document)
        failed = (await trainer.events())[-1].finished
        assert failed.HasField("retry_delay")
        await _take_over(real, trainer, document)
        monkeypatch.setattr(BrokerClient, "get_run", original)
        await until(lambda: kept.read() is None, timeout_s=60)
        assert "fenced: trainer 'another'" in trainer.run.events.message
    assert (await _owner(real)).owner_id == "another"


async def test_a_stop_between_two_tries_leaves_what_the_summary_says_of_the_run(
    tmp_path, model, broker, monkeypatch
) -> None:
    kept = KeptRun(tmp_path / "trainer-7304.json", first_retry_s=600.0)
    async with serving(broker.service()) as (_, target), running_trainer(kept=kept) as trainer:
        await trainer.start(run_document(tmp_path, model, target, num_steps=50, num_eval_prompts=0))
        await until(lambda: trainer.run.events.policy_version >= 2, timeout_s=60)

        async def broken(*_args, **_kwargs):
            raise InternalError("scripted fault")

        monkeypatch.setattr(BrokerClient, "ack_step", broken)
        failed = (await trainer.events())[-1].finished
        summary = json.loads(failed.summary_json)
        assert summary["steps"] >= 2
        await until(lambda: "tries again in" in trainer.run.events.message, timeout_s=30)
        await trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=5)
        stopped = (await trainer.events())[-1].finished
    assert stopped.outcome == trainer_pb2.RUN_OUTCOME_STOPPED
    told = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
    assert told == json.loads(stopped.summary_json)
    assert told == summary | {"outcome": "stopped", "message": "stopped before its next step; can be resumed"}


async def test_a_resume_with_other_rows_at_the_same_path_is_refused_in_a_line(tmp_path, model, broker) -> None:
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        document = run_document(tmp_path, model, target, num_steps=6, num_eval_prompts=0)
        await trainer.start(document)
        await until(lambda: broker.policy_version >= 1, timeout_s=60)
        await trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=5)
        await trainer.events()
        rows = tmp_path / "train.jsonl"
        former = rows.read_text()
        rows.write_text(former.replace("1+1=", "1+3="))
        await trainer.start(document, resume=True)
        refused = (await trainer.events())[-1].finished
        rows.write_text(former)
        await trainer.start(document, resume=True)
        resumed = (await trainer.events())[-1].finished
    assert refused.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert "put the former file back to resume" in refused.message
    assert "\n" not in refused.message
    assert resumed.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, resumed.message
