"""TrainerService and WeightStoreService over real gRPC and HTTP, against a scripted broker, with a real tiny model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import grpc
import numpy as np
import pytest
import torch
from blake3 import blake3
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.errors import (
    FencedError,
    LeaseLostError,
    PenstockError,
    UnknownSampleError,
    VersionConflictError,
    from_rpc_error,
)
from penstock.model.digests import manifest_digest, safetensors_digests
from penstock.security import Security
from penstock.v1 import trainer_pb2, types_pb2, weights_pb2
from penstock.wire.codec import float32_bytes, int32_bytes
from services.trainer.publishing.publisher import serving_weights
from services.trainer.publishing.version_store import WeightStore
from services.trainer.run import loop, prompt_feeder
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker, scored_group
from tests.helpers.serving import serving
from tests.helpers.trainers.training import RunningTrainer, run_document, running_trainer
from tests.helpers.waiting import until

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture
def broker() -> ScriptedTrainingBroker:
    return ScriptedTrainingBroker()


def finish_of(events: list[trainer_pb2.WatchRunResponse]) -> trainer_pb2.RunFinished:
    assert events[-1].HasField("finished")
    return events[-1].finished


async def refused(call: grpc.aio.UnaryUnaryCall) -> PenstockError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value, peer="trainer")


async def test_a_run_trains_publishes_evaluates_and_balances_its_books(tmp_path, model, broker) -> None:
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        run_dir = Path(await trainer.start(run_document(tmp_path, model, target)))
        events = await trainer.events()
        manifest = (await trainer.weights.GetManifest(weights_pb2.GetManifestRequest(run_id="r"), timeout=5)).manifest
    assert finish_of(events).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finish_of(events).message
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [e.step.policy_version for e in events if e.HasField("step")] == [1, 2, 3]
    assert [e.evaluation.policy_version for e in events if e.HasField("evaluation")] == [0, 3]
    assert broker.is_closed
    assert broker.books().balanced
    assert broker.books().trained == broker.books().submitted == 3 * 2 * 4
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary == json.loads(finish_of(events).summary_json)
    assert summary["audit"] == {
        "submitted": 24, "trained": 24, "dropped": {}, "in_flight": 0, "balanced": True,
        "rows": [], "submitted_by_version": [],
    }  # fmt: skip
    assert (summary["steps"], summary["samples_trained"], summary["eval_accuracy_end"]) == (3, 24, 0.0)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    assert lines[0]["reward/mean"] == 0.5
    assert manifest.policy_version == 3
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step_3")
    assert AutoTokenizer.from_pretrained(run_dir / "checkpoints" / "step_3")("1+1=")["input_ids"]
    published = load_file(run_dir / "weights" / "v3-h0.safetensors")
    for name, tensor in exported.state_dict().items():
        if name in published:
            torch.testing.assert_close(published[name], tensor, rtol=0, atol=0)


async def test_prompts_carry_names_seeds_and_the_row(tmp_path, model, broker) -> None:
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await trainer.start(run_document(tmp_path, model, target))
        await trainer.events()
    training = {g: p for g, p in broker.prompts.items() if p.purpose == types_pb2.PURPOSE_TRAIN}
    assert list(training) == [f"t{position}" for position in range(6)]
    assert len({prompt.sampling.seed for prompt in training.values()}) == 6
    assert all(p.text.endswith("=") and json.loads(p.metadata_json)["level"] >= 0 for p in training.values())
    evaluation = [p for p in broker.prompts.values() if p.purpose == types_pb2.PURPOSE_EVALUATE]
    assert {p.group_id[:3] for p in evaluation} == {"e0s", "e0g", "e3s", "e3g"}
    assert {p.sampling.temperature for p in evaluation if p.group_id.startswith("e3g")} == {0.0}
    assert {p.min_policy_version for p in evaluation if p.group_id.startswith("e3")} == {3}
    assert set(broker.dropped.values()) == {"evaluated"}


async def test_a_run_without_data_trains_on_what_others_put_and_submits_nothing(tmp_path, model, broker) -> None:
    for number in range(6):
        prompt = types_pb2.Prompt(
            group_id=f"put{number}", token_ids=int32_bytes([5]), group_size=4, purpose=types_pb2.PURPOSE_TRAIN
        )
        broker.prompts[prompt.group_id] = prompt
        broker.ready.append(prompt.group_id)
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        document = run_document(tmp_path, model, target)
        await trainer.start({**document, "data": {"train": None}})
        events = await trainer.events()
    assert finish_of(events).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finish_of(events).message
    assert set(broker.prompts) == set(broker.trained) == {f"put{number}" for number in range(6)}


async def test_a_full_queue_is_waited_for(tmp_path, model) -> None:
    broker = ScriptedTrainingBroker(max_queued=3)
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await trainer.start(run_document(tmp_path, model, target, num_steps=4))
        events = await trainer.events()
    assert finish_of(events).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED
    assert broker.num_refused > 0
    assert broker.books().trained == 4 * 2 * 4


class ForgetfulBroker(ScriptedTrainingBroker):
    """Loses the first step once it is acknowledged, and with it hands out nothing until it is told of it again.

    So does a broker whose Redis lost its last moment: its generators hold weights that it has not heard of.
    """

    def _next(self, hello, credit):
        if len(self.acks) == 1 and self.policy_version == 1 and not self.is_told:
            self.policy_version = 0
            self.trained.clear()
        return [] if self.policy_version < len(self.acks) else super()._next(hello, credit)

    is_told = False

    async def OpenRun(self, request, context):
        self.is_told = bool(self.acks)
        return await super().OpenRun(request, context)


async def test_a_broker_that_lost_a_step_and_hands_out_nothing_is_reported_of_it(tmp_path, model, monkeypatch) -> None:
    monkeypatch.setattr(loop, "RESTATE_S", 0.2)
    broker = ForgetfulBroker(max_queued=1)
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await trainer.start(run_document(tmp_path, model, target, num_steps=4))
        events = await trainer.events()
    assert broker.is_told
    assert finish_of(events).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED
    assert broker.books().trained == 4 * 2 * 4


async def test_a_fenced_trainer_leaves_no_line_of_the_step_that_was_refused(tmp_path, model, broker) -> None:
    broker.lose_acks, broker.lost_ack_error = 1, FencedError
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await trainer.start(run_document(tmp_path, model, target, num_steps=3))
        events = await trainer.events()
    assert finish_of(events).outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert not any(event.HasField("step") for event in events)
    assert not [path for path in tmp_path.rglob("metrics.jsonl") if path.read_text()]


@pytest.mark.parametrize("error", [VersionConflictError, UnknownSampleError, LeaseLostError])
async def test_broken_streams_and_lost_acks_train_each_group_once(tmp_path, model, broker, error) -> None:
    """A broker whose Redis lost its last moment may have lost the version, the groups, or that they were handed out."""
    broker.break_streams_after = 3
    broker.lose_acks = 1
    broker.lost_ack_error = error
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        document = run_document(tmp_path, model, target, num_eval_prompts=0)
        await trainer.start({**document, "trainer": {"max_groups_per_microbatch": 1}})
        events = await trainer.events()
    assert finish_of(events).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finish_of(events).message
    assert sorted(broker.trained.values()) == [1, 1, 2, 2, 3, 3]
    assert len(broker.hellos) == 4
    assert [list(hello.held_group_ids) for hello in broker.hellos[:2]] == [[], ["t0"]]
    assert any(len(request.steps) > 0 for request in broker.opened)


async def test_a_group_without_usable_samples_is_dropped_and_replaced(tmp_path, model, broker) -> None:
    def make_group(prompt: types_pb2.Prompt, *, policy_version: int) -> types_pb2.TrajectoryGroup:
        group = scored_group(prompt, policy_version=policy_version)
        if prompt.group_id == "t1":
            for trajectory in group.trajectories:
                trajectory.behavior_logprobs = float32_bytes(np.full(5, np.nan))
        return group

    broker.make_group = make_group
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await trainer.start(run_document(tmp_path, model, target, num_eval_prompts=0))
        events = await trainer.events()
    assert finish_of(events).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED
    assert broker.dropped == {"t1": "malformed"}
    books = broker.books()
    assert (books.submitted, books.trained, books.in_flight, books.balanced) == (28, 24, 0, True)


async def test_a_stopped_run_resumes_with_the_same_optimizer_and_data(tmp_path, model, broker, monkeypatch) -> None:
    # The data are not all read when it is stopped.
    broker.max_queued = 1
    monkeypatch.setattr(prompt_feeder, "SUBMIT_BATCH_GROUPS", 2)
    document = run_document(tmp_path, model, "", num_steps=5)
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        document["broker"] = target
        run_dir = Path(await trainer.start(document))
        await until(lambda: len(broker.acks) >= 2, timeout_s=30)
        broker.is_handing_out = False
        await trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=5)
        stopped = finish_of(await trainer.events())
        assert stopped.outcome == trainer_pb2.RUN_OUTCOME_STOPPED
        steps_before = json.loads(stopped.summary_json)["steps"]
        assert not broker.is_closed
        assert (run_dir / "checkpoints" / f"step_{steps_before}" / "COMPLETE").exists()
        broker.is_handing_out = True
        await trainer.start(document, resume=True)
        resumed = await trainer.events()
    assert finish_of(resumed).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finish_of(resumed).message
    assert [e.step.policy_version for e in resumed if e.HasField("step")] == list(range(steps_before + 1, 6))
    # A group's name says where in the data it stands: none was passed over, none read again.
    assert [name for name in broker.prompts if name.startswith("t")] == [f"t{position}" for position in range(5 * 2)]
    assert broker.books().trained == 5 * 2 * 4
    assert broker.books().balanced
    assert json.loads(finish_of(resumed).summary_json)["samples_trained"] == 40
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4, 5]
    rates = {line["optimizer/learning_rate"] for line in lines}
    assert rates == {1e-3}


async def test_a_crash_rewinds_to_the_checkpoint_and_cuts_the_metrics(tmp_path, model, broker) -> None:
    document = run_document(tmp_path, model, "", num_steps=4, checkpoint_every_steps=2, num_eval_prompts=0)
    async with serving(broker.service()) as (_, target):
        document["broker"] = target
        async with running_trainer() as trainer:
            run_dir = Path(await trainer.start(document))
            await until(lambda: broker.policy_version >= 3, timeout_s=30)
            await trainer.events()
        # As after a kill -9 between steps 3 and 4: only the checkpoint of step 2 is there.
        for step in (3, 4):
            for path in (run_dir / "checkpoints").glob(f"step_{step}/COMPLETE"):
                path.unlink()
        async with running_trainer() as trainer:
            await trainer.start(document, resume=True)
            events = await trainer.events()
            newest = await trainer.weights.GetManifest(weights_pb2.GetManifestRequest(run_id="r"), timeout=5)
    assert finish_of(events).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finish_of(events).message
    assert [e.step.policy_version for e in events if e.HasField("step")] == [3, 4]
    assert newest.manifest.history == 1
    assert broker.books().trained == 4 * 2 * 4
    lines = [json.loads(line)["policy_version"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4]


async def test_a_gradient_that_is_not_finite_fails_the_run_and_keeps_the_last_checkpoint(
    tmp_path, model, broker
) -> None:
    document = run_document(tmp_path, model, "", num_steps=4, checkpoint_every_steps=1, num_eval_prompts=0)

    def make_group(prompt: types_pb2.Prompt, *, policy_version: int) -> types_pb2.TrajectoryGroup:
        group = scored_group(prompt, policy_version=policy_version)
        if policy_version == 2:
            for trajectory in group.trajectories:
                trajectory.advantages = float32_bytes(np.full(5, 3e38))
        return group

    broker.make_group = make_group
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        document["broker"] = target
        run_dir = Path(await trainer.start(document))
        events = await trainer.events()
    finished = finish_of(events)
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert "loss" in finished.message or "gradient" in finished.message
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step_1", "step_2"]
    assert json.loads(finished.summary_json)["outcome"] == "failed"


async def test_measuring_goes_on_beside_training(tmp_path, model, broker) -> None:
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await trainer.start(run_document(tmp_path, model, target, num_steps=6, eval_every_steps=2))
        events = await trainer.events()
    assert finish_of(events).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finish_of(events).message
    measured = [e.evaluation.policy_version for e in events if e.HasField("evaluation")]
    assert {0, 2, 6} <= set(measured) <= {0, 2, 4, 6}
    assert len(measured) == len(set(measured))


async def test_a_prompt_that_the_broker_refuses_fails_the_run_by_name(tmp_path, model, broker) -> None:
    broker.refuse_group_id = "t3"
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await trainer.start(run_document(tmp_path, model, target, num_eval_prompts=0))
        finished = finish_of(await trainer.events())
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert "refused prompt t3: scripted refusal" in finished.message


async def test_bad_requests_name_the_key_and_start_nothing(tmp_path, model) -> None:
    good = run_document(tmp_path, model, "127.0.0.1:9")
    cases = [
        ({**good, "modelx": 1}, "did you mean 'model'?"),
        ({**good, "model": {"path": str(tmp_path / "nowhere")}}, "model.path"),
        ({**good, "data": {"train": str(tmp_path / "none.jsonl")}}, "data.train"),
        ({**good, "run": {"num_steps": 0}}, "run.num_steps"),
        ({**good, "run": {"id": "other"}}, "run.id"),
    ]
    async with running_trainer() as trainer:
        for document, expected in cases:
            request = trainer_pb2.StartRunRequest(run_id="r", config_json=json.dumps(document))
            error = await refused(trainer.trainer.StartRun(request, timeout=5))
            assert error.reason == "INVALID_FIELD"
            assert expected in str(error)
        for run_id, text in (("a/b", json.dumps(good)), ("r", "{")):
            request = trainer_pb2.StartRunRequest(run_id=run_id, config_json=text)
            assert (await refused(trainer.trainer.StartRun(request, timeout=5))).reason == "INVALID_FIELD"
        status = await trainer.trainer.GetTrainer(trainer_pb2.GetTrainerRequest(), timeout=5)
        assert status.state == trainer_pb2.TRAINER_STATE_IDLE
        assert status.weights_url == trainer.weights_url
        watch = trainer.trainer.WatchRun(trainer_pb2.WatchRunRequest(run_id="r"), timeout=5)
        assert (await refused(watch.read())).reason == "UNKNOWN_RUN"
        stop = trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=5)
        assert (await refused(stop)).reason == "UNKNOWN_RUN"


async def test_a_data_error_found_while_loading_fails_the_run_with_its_line(tmp_path, model) -> None:
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"answer": "4"}\n')
    document = {**run_document(tmp_path, model, "127.0.0.1:9"), "data": {"train": str(rows)}}
    async with running_trainer() as trainer:
        await trainer.start(document)
        finished = finish_of(await trainer.events())
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert "line 2: no prompt" in finished.message


async def test_one_run_at_a_time_and_the_same_name_again_is_fine(tmp_path, model, broker) -> None:
    broker.is_handing_out = False
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        document = run_document(tmp_path, model, target)
        run_dir = await trainer.start(document)
        assert await trainer.start(document) == run_dir
        request = trainer_pb2.StartRunRequest(run_id="s", config_json=json.dumps(document))
        assert (await refused(trainer.trainer.StartRun(request, timeout=5))).reason == "BUSY"
        await until(lambda: len(broker.prompts) > 0, timeout_s=30)
        status = await trainer.trainer.GetTrainer(trainer_pb2.GetTrainerRequest(), timeout=5)
        assert status.state == trainer_pb2.TRAINER_STATE_EVALUATING
        await trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=5)
        assert finish_of(await trainer.events()).outcome == trainer_pb2.RUN_OUTCOME_STOPPED
        request = trainer_pb2.StartRunRequest(run_id="r", config_json=json.dumps(document))
        error = await refused(trainer.trainer.StartRun(request, timeout=5))
        assert "resume it" in str(error)


async def test_watching_replays_from_a_sequence_and_ends(tmp_path, model, broker) -> None:
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await trainer.start(run_document(tmp_path, model, target, num_eval_prompts=0))
        everything = await trainer.events()
        request = trainer_pb2.WatchRunRequest(run_id="r", from_sequence=everything[3].sequence)
        again = [event async for event in trainer.trainer.WatchRun(request, timeout=10)]
    assert again == everything[3:]


async def test_health_is_reported_for_both_services() -> None:
    async with running_trainer() as trainer:
        stub = health_pb2_grpc.HealthStub(trainer.channel)
        for name in ("", "penstock.v1.TrainerService", "penstock.v1.WeightStoreService"):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert response.status == health_pb2.HealthCheckResponse.SERVING


async def finished_run(trainer: RunningTrainer, tmp_path: Path, model: Path, target: str) -> None:
    await trainer.start(run_document(tmp_path, model, target, num_eval_prompts=0))
    assert finish_of(await trainer.events()).outcome == trainer_pb2.RUN_OUTCOME_COMPLETED


async def test_content_over_http_is_what_the_manifest_states(tmp_path, model, broker) -> None:
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await finished_run(trainer, tmp_path, model, target)
        request = weights_pb2.GetManifestRequest(run_id="r", policy_version=2)
        manifest = (await trainer.weights.GetManifest(request, timeout=5)).manifest
        async with aiohttp.ClientSession() as session:
            async with session.get(manifest.urls[0]) as response:
                whole = await response.read()
            start = len(whole) // 2
            async with session.get(manifest.urls[0], headers={"Range": f"bytes={start}-"}) as response:
                assert response.status == 206
                assert await response.read() == whole[start:]
            async with session.get(f"{trainer.weights_url}/weights/r/v9-h0.safetensors") as response:
                assert response.status == 404
    assert len(whole) == manifest.size_bytes
    for chunk in manifest.chunks:
        assert blake3(whole[chunk.offset : chunk.offset + chunk.size_bytes]).hexdigest() == chunk.blake3
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(whole)
    assert manifest_digest(safetensors_digests(copy)) == manifest.digest


async def test_old_versions_are_deleted_and_unknown_ones_are_named(tmp_path, model, broker) -> None:
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await finished_run(trainer, tmp_path, model, target)
        kept = sorted(path.name for path in (tmp_path / "runs" / "r" / "weights").glob("*.safetensors"))
        assert kept == ["v1-h0.safetensors", "v2-h0.safetensors", "v3-h0.safetensors"]
        for request in (
            weights_pb2.GetManifestRequest(run_id="r", policy_version=0),
            weights_pb2.GetManifestRequest(run_id="other"),
        ):
            error = await refused(trainer.weights.GetManifest(request, timeout=5))
            assert error.reason == "UNKNOWN_VERSION"


async def test_a_wrong_digest_is_refused_and_not_recorded(tmp_path, model, broker) -> None:
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await finished_run(trainer, tmp_path, model, target)
        manifest = (await trainer.weights.GetManifest(weights_pb2.GetManifestRequest(run_id="r"), timeout=5)).manifest
        report = weights_pb2.ReportHoldingRequest(run_id="r", receiver_id="gen-1", policy_version=3, digest="0" * 64)
        assert (await refused(trainer.weights.ReportHolding(report, timeout=5))).reason == "DIGEST_MISMATCH"
        assert not trainer.store.holdings
        report.digest = manifest.digest
        assert (await trainer.weights.ReportHolding(report, timeout=5)).newest_version == 3
        assert trainer.store.holdings["gen-1"].policy_version == 3


async def test_a_manifest_watcher_gets_the_newest_first_and_ends_when_the_server_drains(
    tmp_path, model, broker
) -> None:
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await finished_run(trainer, tmp_path, model, target)
        watch = trainer.weights.WatchManifests(
            weights_pb2.WatchManifestsRequest(run_id="r", receiver_id="gen-1"), timeout=20
        )
        assert (await watch.read()).manifest.policy_version == 3
        trainer.server.stopping.set()
        assert (await refused(watch.read())).reason == "UNAVAILABLE"


async def test_weights_need_the_token_when_there_is_one() -> None:
    security = Security(token="secret", allows_plain=True)
    async with (
        serving_weights(WeightStore(), listen="127.0.0.1:0", security=security) as url,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"{url}/weights/r/v0-h0.safetensors") as response:
            assert response.status == 401
        headers = {"Authorization": "Bearer secret"}
        async with session.get(f"{url}/weights/r/v0-h0.safetensors", headers=headers) as response:
            assert response.status == 404


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"max_silence_s": 0.2}, "no sample group came for 0.2 s (as trainer.max_silence_s says); last word"),
        ({"max_evaluation_silence_s": 0.2}, "did not come within 0.2 s (as trainer.max_evaluation_silence_s says)"),
    ],
)
async def test_a_run_that_waits_too_long_says_by_which_limit_it_ends(tmp_path, model, broker, section, message) -> None:
    broker.is_handing_out = False
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        document = run_document(tmp_path, model, target)
        if "max_silence_s" in section:
            document["data"].pop("eval", None)
        document["trainer"] = document.get("trainer", {}) | section
        await trainer.start(document)
        finished = finish_of(await trainer.events())
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert message in finished.message


async def test_a_stop_does_not_wait_for_a_broker_that_is_away(tmp_path, model) -> None:
    async with running_trainer() as trainer:
        await trainer.start(run_document(tmp_path, model, "127.0.0.1:9"))
        await until(lambda: "opening" in trainer.run.events.message, timeout_s=30)
        begun = asyncio.get_running_loop().time()
        await trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=5)
        finished = finish_of(await trainer.events())
        assert asyncio.get_running_loop().time() - begun < 8
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_STOPPED
    assert json.loads(finished.summary_json)["audit"] is None
