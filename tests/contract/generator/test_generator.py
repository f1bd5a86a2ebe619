"""A whole generator against a scripted broker and a scripted weight store: real gRPC, real HTTP, emulated engine."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import numpy as np
import pytest
from google.protobuf import duration_pb2

from penstock.clients import tokens
from penstock.errors import (
    FencedError,
    InvalidFieldError,
    NotOfferedError,
    ServiceUnavailableError,
    UnknownVersionError,
)
from penstock.network.rpc import call, wait_until_serving
from penstock.security import Security
from penstock.v1 import broker_pb2, generator_pb2, types_pb2
from services.generator.engine.engine import FinishReason
from tests.helpers.brokers.scripted_generation import prompt
from tests.helpers.generators.generator_bench import Bench, emulated
from tests.helpers.generators.scripted_engine import PausableScriptedEngine, ScriptedEngine, span
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
async def bench(tmp_path):
    made = Bench(tmp_path)
    async with made.store.serving_content():
        yield made


async def test_samples_are_decoded_once_the_weights_are_attested(bench):
    samples = [s for g in range(6) for s in bench.broker.submit(prompt(f"g{g}", group_size=4, seed=g))]
    async with bench.running(emulated()):
        await asyncio.sleep(0.05)
        assert bench.broker.hellos == []
        manifest = await bench.store.publish(0)
        await until(lambda: bench.broker.num_finished == len(samples))
        view = await bench.view()
        assert (view.policy_version, view.weights_digest) == (0, manifest.digest)
        assert view.num_weight_updates == 1
        assert view.busy_s > 0
    assert max(beat.num_running + beat.num_waiting for beat in bench.broker.beats) <= 8
    for sample in samples:
        assert sample.num_leases == 1
        assert sample.text == " ".join(str(token_id) for token_id in sample.token_ids)
        assert sample.versions == [0] * len(sample.token_ids)
    assert bench.store.reports[0].digest == manifest.digest
    assert bench.store.reports[0].fetched_bytes == manifest.size_bytes
    hello = bench.broker.hellos[0]
    assert hello.generator_id.startswith("gen-0-")
    assert hello.max_context_tokens == 4096
    assert not hello.listens_in_plain_text
    assert not hello.HasField("routing")
    assert {sample.routes for sample in samples} == {b""}
    spans = [item for beat in bench.broker.beats for item in beat.busy_spans]
    for beat in bench.broker.beats:
        shown_ns = beat.now_time.ToNanoseconds()
        assert all(span.end_time.ToNanoseconds() <= shown_ns for span in beat.busy_spans)
    assert all(a.end_time.ToNanoseconds() <= b.start_time.ToNanoseconds() for a, b in pairwise(spans))


async def test_a_generator_whose_listeners_others_reach_in_plain_text_says_so(bench):
    bench.security = Security(allows_plain=True, plain_listeners=["0.0.0.0:7302"])
    await bench.store.publish(0)
    async with bench.running(emulated()):
        await until(lambda: bench.broker.hellos != [])
    assert bench.broker.hellos[0].listens_in_plain_text


async def test_a_version_published_while_decoding_is_taken_in_flight(bench):
    bench.broker.submit(prompt("long", max_new_tokens=400))
    await bench.store.publish(0)
    async with bench.running(emulated(token_s=2e-3, mean_tokens=300, length_sigma=0)):
        await until(lambda: len(bench.broker.samples[0].token_ids) > 10)
        await bench.store.publish(1)
        await until(lambda: [beat.policy_version for beat in bench.broker.beats[-1:]] == [1])
        await until(lambda: bench.broker.num_finished == 1)
    versions = bench.broker.samples[0].versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


async def test_decoding_goes_on_while_a_version_is_on_its_way(bench):
    bench.broker.submit(prompt("long", max_new_tokens=4000))
    await bench.store.publish(0)
    async with bench.running(emulated(token_s=5e-3, mean_tokens=4000, length_sigma=0)):
        sample = bench.broker.samples[0]
        await until(lambda: len(sample.token_ids) > 10)
        bench.store.is_sending.clear()
        num_asked = len(bench.store.ranges)
        await bench.store.publish(1)
        await until(lambda: len(bench.store.ranges) > num_asked)
        num_tokens = len(sample.token_ids)
        await until(lambda: len(sample.token_ids) > num_tokens + 20)
        assert set(sample.versions) == {0}
        bench.store.is_sending.set()
        await until(lambda: sample.versions[-1] == 1)


async def test_it_asks_for_no_more_than_its_kv_cache_bears(bench):
    samples = [s for g in range(15) for s in bench.broker.submit(prompt(f"g{g}", group_size=4, max_new_tokens=200))]
    await bench.store.publish(0)
    engine = emulated(mean_tokens=150, length_sigma=0, max_num_seqs=64, max_model_len=256, kv_capacity_tokens=1100)
    async with bench.running(engine, max_concurrent_samples=64):
        await until(lambda: any(beat.active_lease_ids for beat in bench.broker.beats))
        assert 1 <= (await bench.view()).num_samples_borne <= 12
        await until(lambda: bench.broker.num_finished == len(samples), timeout_s=30)
        # With all 60 at once it is dozens.
        assert (await bench.view()).num_preemptions <= 12
    assert 3 <= max(len(beat.active_lease_ids) for beat in bench.broker.beats) <= 12


async def test_versions_in_between_are_skipped_and_old_files_deleted(bench):
    for version in range(6):
        await bench.store.publish(version)
    async with bench.running(emulated()):
        await until(lambda: len(bench.store.reports) == 1)
        assert bench.store.reports[0].policy_version == 5
        for version in range(6, 9):
            await bench.store.publish(version)
            await until(lambda: bench.store.reports[-1].policy_version == version)  # noqa: B023
        folder = bench.tmp_path / "cache" / "gen-0"
        # Files go after the version was reported.
        await until(lambda: sorted(path.name[:9] for path in folder.glob("v*")) == ["v00000007", "v00000008"])


async def test_a_rewound_trainers_lower_version_replaces_a_higher_one(bench):
    await bench.store.publish(7)
    async with bench.running(emulated()):
        await until(lambda: len(bench.store.reports) == 1)
        await bench.store.publish(5, history=1)
        await until(lambda: bench.store.reports[-1].policy_version == 5)
        # Well under the 2 s between beats: a new version is told at once.
        await until(lambda: bench.broker.beats[-1].policy_version == 5, timeout_s=1)


def _owner(epoch, instance_id="first"):
    return broker_pb2.RunOwner(instance_id=instance_id, owner_id=f"trainer-{epoch}", epoch=epoch)


async def test_weights_of_a_trainer_that_was_replaced_are_not_installed(bench):
    bench.broker.owner = _owner(1)
    await bench.store.publish(3, owner=_owner(1))
    async with bench.running(emulated()):
        await until(lambda: len(bench.store.reports) == 1)
        bench.broker.owner = _owner(2)
        # One that says to have taken over is followed, and the zombie is not, also when it is asked for by name.
        await bench.store.publish(4, owner=_owner(2))
        await until(lambda: [beat.policy_version for beat in bench.broker.beats[-1:]] == [4])
        await bench.store.publish(9, owner=_owner(1))
        with pytest.raises(
            FencedError, match="published in epoch 1 of instance 'first', but the run is trained in epoch"
        ):
            await call(bench.stub.PullWeights, generator_pb2.PullWeightsRequest(policy_version=9), peer="g")
        await bench.store.publish(5, owner=_owner(2))
        await until(lambda: [beat.policy_version for beat in bench.broker.beats[-1:]] == [5])
        await until(lambda: len(bench.store.reports) == 3)
    assert [report.policy_version for report in bench.store.reports] == [3, 4, 5]


async def test_the_same_weights_of_a_later_epoch_are_taken_over_without_a_fetch(bench):
    bench.broker.owner = _owner(1)
    await bench.store.publish(3, owner=_owner(1))
    async with bench.running(emulated()):
        await until(lambda: len(bench.store.reports) == 1)
        num_asked = len(bench.store.ranges)
        bench.broker.owner = _owner(2)
        await bench.store.publish(3, owner=_owner(2))
        await until(lambda: len(bench.store.reports) == 2)
        assert (bench.store.reports[1].policy_version, bench.store.reports[1].fetched_bytes) == (3, 0)
        assert len(bench.store.ranges) == num_asked
        assert (await bench.view()).num_weight_updates == 1


async def test_another_run_of_the_same_id_is_followed_to_its_lower_version(bench):
    bench.broker.owner = _owner(4)
    await bench.store.publish(50, owner=_owner(4))
    async with bench.running(emulated()):
        await until(lambda: len(bench.store.reports) == 1)
        # Announced before the broker says so: it waits for the broker's word.
        await bench.store.publish(0, seed=99, owner=_owner(1, "second"))
        bench.broker.owner = _owner(1, "second")
        await until(lambda: [beat.policy_version for beat in bench.broker.beats[-1:]] == [0])
        await until(lambda: bench.broker.beats[-1].instance_id == "second")


async def test_a_stop_returns_unfinished_samples_with_their_prefix_and_another_generator_goes_on(bench):
    (sample,) = bench.broker.submit(prompt("long", max_new_tokens=60, seed=3))
    await bench.store.publish(0)
    slow = {"mean_tokens": 60, "length_sigma": 0, "seed": 1}
    async with bench.running(emulated(token_s=5e-3, **slow)):
        await until(lambda: len(sample.token_ids) >= 10)
        started_s = asyncio.get_running_loop().time()
        await bench.generator.stop()
        assert asyncio.get_running_loop().time() - started_s < 3
        assert sample.finish_reason == types_pb2.FINISH_REASON_ABORTED
    prefix = list(sample.token_ids)
    async with bench.running(emulated(**slow)):
        await until(lambda: sample.is_finished)
    assert sample.token_ids[: len(prefix)] == prefix
    assert sample.num_leases == 2
    assert sample.text == " ".join(str(token_id) for token_id in sample.token_ids)


async def test_leases_on_their_way_while_it_stops_are_given_back_too(bench):
    await bench.store.publish(0)
    async with bench.running(ScriptedEngine()):
        await until(lambda: len(bench.broker.beats) > 0)
        samples = [s for g in range(3) for s in bench.broker.submit(prompt(f"g{g}", group_size=2))]
        await bench.generator.stop()
        assert bench.broker.num_out == 0
        assert len(bench.broker.queue) == len(samples)


async def test_a_broker_that_restarts_loses_nothing(bench):
    samples = [s for g in range(10) for s in bench.broker.submit(prompt(f"g{g}", group_size=4))]
    bench.broker.num_stream_breaks = 3
    await bench.store.publish(0)
    async with bench.running(emulated(token_s=5e-4)):
        await until(lambda: bench.broker.num_finished > 5)
        bench.broker.break_lease_stream()
        await until(lambda: bench.broker.num_finished == len(samples), timeout_s=20)
    assert all(sample.num_leases == 1 for sample in samples)


async def test_a_broker_that_takes_nothing_slows_decoding_and_memory_does_not_grow(bench):
    samples = [s for g in range(12) for s in bench.broker.submit(prompt(f"g{g}", group_size=8, max_new_tokens=4000))]
    await bench.store.publish(0)
    bench.broker.is_acknowledging = False
    async with bench.running(emulated(token_s=1e-6, mean_tokens=1e6, length_sigma=0, max_num_seqs=64)):
        session = bench.generator._tokens
        await until(lambda: not session.has_room)
        seen = [0]
        while seen[-1] != bench.generator.view().num_tokens_generated:
            seen.append(bench.generator.view().num_tokens_generated)
            await asyncio.sleep(0.3)
        assert len(seen) < 5, "decoding goes on"
        # Beyond the bound no more than what each of the 8 slots holds.
        assert session._own._buffered_bytes <= tokens.MAX_BUFFERED_BYTES + 8 * 4000 * 8
        assert len(bench.generator._rollouts.lease_ids) < len(samples)
        bench.broker.is_acknowledging = True
        await until(lambda: bench.broker.num_finished == len(samples), timeout_s=20)
    assert all(len(sample.token_ids) == 4000 and sample.num_leases == 1 for sample in samples)


async def test_a_sample_the_store_half_forgot_is_given_back_and_decoded_again(bench):
    engine = ScriptedEngine()
    (sample,) = bench.broker.submit(prompt("g"))
    await bench.store.publish(0)
    async with bench.running(engine):
        await until(lambda: "g-0-1" in engine.requests)
        engine.say("g-0-1", span(5, 6, 7))
        await until(lambda: len(sample.token_ids) == 3)
        bench.broker.refusals.append(("OFFSET_MISMATCH", 2))
        engine.say("g-0-1", span(8))
        await until(lambda: "g-0-2" in engine.requests)
        assert engine.requests["g-0-2"].prefix_token_ids == (5, 6)
        engine.say("g-0-2", span(9, finish=FinishReason.LENGTH))
        await until(lambda: sample.is_finished)
    assert sample.token_ids == [5, 6, 9]


async def test_samples_to_train_on_come_with_routes_if_the_run_replays_them(bench):
    moe = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2}
    (bench.tmp_path / "model" / "config.json").write_text(json.dumps(moe))
    routes = np.arange(8, dtype=np.uint8).reshape(4, 1, 2)
    engine = ScriptedEngine()
    (sample,) = bench.broker.submit(prompt("g"))
    measured = prompt("e")
    measured.purpose = types_pb2.PURPOSE_EVALUATE
    bench.broker.submit(measured)
    await bench.store.publish(0)
    async with bench.running(engine, records_routes=True):
        await until(lambda: {"g-0-1", "e-0-1"} <= engine.requests.keys())
        assert engine.requests["g-0-1"].has_routes
        assert not engine.requests["e-0-1"].has_routes
        # Two rows of the prompt, and one of each token.
        engine.say("g-0-1", span(5, 6, routes=routes))
        engine.say("g-0-1", span(7, finish=FinishReason.LENGTH, routes=routes[:1]))
        await until(lambda: sample.is_finished)
    assert sample.routes == bytes([*range(8), 0, 1])
    shape = bench.broker.hellos[0].routing
    assert (shape.num_layers, shape.num_experts, shape.experts_per_token) == (1, 8, 2)


async def test_a_lost_or_revoked_lease_is_aborted(bench):
    engine = ScriptedEngine()
    bench.broker.submit(prompt("g", group_size=2))
    await bench.store.publish(0)
    async with bench.running(engine):
        await until(lambda: engine.num_running == 2)
        bench.broker.refusals.append(("LEASE_LOST", 0))
        engine.say("g-0-1", span(5))
        await until(lambda: engine.num_running == 1)
        bench.broker.revoke("g-1-1")
        await until(lambda: engine.num_running == 0)
        await until(lambda: list(bench.broker.beats[-1].active_lease_ids) == [])
        await until(lambda: dict(bench.broker.beats[-1].refused_chunks) == {"LEASE_LOST": 1})


async def test_a_closed_run_drops_everything_and_the_generator_stays(bench):
    engine = ScriptedEngine()
    bench.broker.submit(prompt("g"))
    await bench.store.publish(0)
    async with bench.running(engine):
        await until(lambda: engine.num_running == 1)
        bench.broker.is_closed = True
        await until(lambda: engine.num_running == 0)
        bench.broker.is_closed = False
        bench.broker.submit(prompt("again"))
        await until(lambda: "again-0-1" in engine.requests)
        assert not any(task.done() for task in bench.tasks)


async def test_drain_finishes_what_is_held_and_takes_nothing_new(bench):
    engine = ScriptedEngine()
    bench.broker.submit(prompt("g"))
    await bench.store.publish(0)
    async with bench.running(engine):
        await until(lambda: engine.num_running == 1)
        response = await call(bench.stub.DrainGenerator, generator_pb2.DrainGeneratorRequest(), peer="generator")
        assert not response.is_drained
        assert (await bench.view()).state == generator_pb2.GENERATOR_STATE_DRAINING
        await until(lambda: bench.broker.beats[-1].is_draining)
        bench.broker.submit(prompt("later"))
        engine.say("g-0-1", span(2, finish=FinishReason.STOP))
        await until(lambda: bench.broker.num_finished == 1)
        await until(lambda: bench.generator.drain(None))
        assert (await bench.view()).state == generator_pb2.GENERATOR_STATE_DRAINED
        assert "later-0-1" not in engine.requests


async def test_drain_with_a_grace_gives_back_what_is_not_finished(bench):
    engine = ScriptedEngine()
    (sample,) = bench.broker.submit(prompt("g"))
    await bench.store.publish(0)
    async with bench.running(engine):
        await until(lambda: engine.num_running == 1)
        request = generator_pb2.DrainGeneratorRequest(grace=duration_pb2.Duration(nanos=10_000_000))
        await call(bench.stub.DrainGenerator, request, peer="generator")
        await until(lambda: sample.finish_reason == types_pb2.FINISH_REASON_ABORTED)
        request = generator_pb2.DrainGeneratorRequest(grace=duration_pb2.Duration(seconds=-1))
        with pytest.raises(InvalidFieldError):
            await call(bench.stub.DrainGenerator, request, peer="generator")


async def test_pull_installs_a_version_now_and_answers_at_once_when_it_is_held(bench):
    engine = ScriptedEngine()
    await bench.store.publish(0)
    async with bench.running(engine):
        await until(lambda: len(engine.updates) == 1)
        request = generator_pb2.PullWeightsRequest(mode=generator_pb2.UPDATE_MODE_DRAIN)
        response = await call(bench.stub.PullWeights, request, peer="generator")
        assert (response.policy_version, response.digest) == (0, bench.store.manifests[0].digest)
        assert len(engine.updates) == 1
        request = generator_pb2.PullWeightsRequest(policy_version=9)
        with pytest.raises(UnknownVersionError):
            await call(bench.stub.PullWeights, request, peer="generator")
        with pytest.raises(InvalidFieldError):
            await call(bench.stub.PullWeights, generator_pb2.PullWeightsRequest(mode=77), peer="generator")


async def test_what_happens_to_running_samples_is_as_configured_or_as_asked(bench):
    engine = ScriptedEngine()
    await bench.store.publish(0)
    async with bench.running(engine, update_mode="recompute"):
        await until(lambda: len(engine.updates) == 1)
        assert [update.is_recomputing for update in engine.updates] == [True]
        assert (await bench.view()).update_mode == generator_pb2.UPDATE_MODE_RECOMPUTE
        asked = []
        for version, mode in ((1, generator_pb2.UPDATE_MODE_KEEP), (2, generator_pb2.UPDATE_MODE_UNSPECIFIED)):
            await bench.store.publish(version, is_announced=False)
            request = generator_pb2.PullWeightsRequest(policy_version=version, mode=mode)
            asked.append((await call(bench.stub.PullWeights, request, peer="generator")).mode)
        assert asked == [generator_pb2.UPDATE_MODE_KEEP, generator_pb2.UPDATE_MODE_RECOMPUTE]
        assert [update.is_recomputing for update in engine.updates] == [True, False, True]
        view = await bench.view()
        assert view.num_recomputed_tokens == 2 * engine.num_recomputed_tokens
        assert view.total_swap_pause_s == pytest.approx(0.03)


async def test_draining_ends_samples_under_the_old_weights_and_asks_for_none_meanwhile(bench):
    bench.broker.submit(prompt("first", max_new_tokens=200))
    await bench.store.publish(0)
    async with bench.running(emulated(token_s=2e-3, mean_tokens=150, length_sigma=0), update_mode="drain"):
        await until(lambda: len(bench.broker.samples[0].token_ids) > 10)
        await bench.store.publish(1)
        await until(lambda: bench.generator._rollouts.num_free_slots() == 0)
        bench.broker.submit(prompt("second", max_new_tokens=20))
        await until(lambda: bench.broker.num_finished == 2)
    assert [set(sample.versions) for sample in bench.broker.samples] == [{0}, {1}]


async def test_only_an_engine_that_can_pause_is_paused(bench):
    request = generator_pb2.PauseGeneratorRequest(is_paused=True)
    engine = PausableScriptedEngine()
    async with bench.running(engine):
        await until(lambda: bench.generator.view().state == generator_pb2.GENERATOR_STATE_SERVING)
        await call(bench.stub.PauseGenerator, request, peer="generator")
        assert engine.is_paused
        assert (await bench.view()).state == generator_pb2.GENERATOR_STATE_PAUSED
        await call(bench.stub.PauseGenerator, generator_pb2.PauseGeneratorRequest(), peer="generator")
        assert not engine.is_paused
    async with bench.running(ScriptedEngine()):
        await until(lambda: bench.generator.view().state == generator_pb2.GENERATOR_STATE_SERVING)
        with pytest.raises(NotOfferedError):
            await call(bench.stub.PauseGenerator, request, peer="generator")


async def test_while_the_engine_is_built_the_state_says_so_and_control_is_refused(bench):
    engine = ScriptedEngine()
    built = asyncio.Event()
    engine.start = built.wait
    async with bench.running(engine):
        assert (await bench.view()).state == generator_pb2.GENERATOR_STATE_STARTING
        with pytest.raises(ServiceUnavailableError):
            await call(bench.stub.PullWeights, generator_pb2.PullWeightsRequest(), peer="generator")
        built.set()
        await until(lambda: bench.generator.view().state == generator_pb2.GENERATOR_STATE_SERVING)
        assert await wait_until_serving(bench.target, service="penstock.v1.GeneratorService", timeout_s=5)
