"""What becomes of samples and versions when weights are corrupt, or an engine fails, hangs or stands still."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading

import pytest

from penstock.model.digests import mismatch_error
from penstock.network.rpc import call
from penstock.v1 import generator_pb2, types_pb2
from services.generator.engine.engine import (
    EngineHungError,
    EngineStoppedError,
    FinishReason,
    GenerateRequest,
    SamplingSettings,
    WeightUpdate,
)
from services.generator.engine.install_progress import InstallSigns, give_sign, signs_file
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers import transformers_engine
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.generator import GeneratorFailedError
from services.generator.weights import puller
from tests.helpers.brokers.scripted_generation import prompt
from tests.helpers.generators.generator_bench import Bench, emulated
from tests.helpers.generators.scripted_engine import PausableScriptedEngine, ScriptedEngine, span
from tests.helpers.models.tiny_model import make_tiny_model, make_update, write_perturbed
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
async def bench(tmp_path):
    made = Bench(tmp_path)
    async with made.store.serving_content():
        yield made


async def test_corrupt_weights_are_refused_counted_and_never_served(bench):
    bench.broker.submit(prompt("g"))
    bench.store.corrupt_requests = 2
    await bench.store.publish(0)
    async with bench.running(emulated()):
        await until(lambda: bench.broker.num_finished == 1)
        assert (await bench.view()).num_weights_refused == 2
    assert len(bench.store.reports) == 1


async def test_an_engine_that_cannot_prove_a_version_takes_no_leases_until_it_can(bench):
    engine = ScriptedEngine()
    engine.update_errors = [mismatch_error("the engine holds something else", ["model.bias"])]
    bench.broker.submit(prompt("g"))
    await bench.store.publish(0)
    async with bench.running(engine):
        await until(lambda: len(engine.updates) == 1)
        assert bench.broker.hellos == []
        await until(lambda: len(engine.requests) == 1)
        assert len(engine.updates) == 2
        assert (await bench.view()).num_weights_refused == 1


async def test_an_engine_that_never_proves_a_version_ends_the_process(bench, monkeypatch):
    monkeypatch.setattr(puller, "backoff_s", lambda: iter([0.0] * 100))
    engine = ScriptedEngine()
    engine.reported_digest = "f" * 64
    await bench.store.publish(0)
    async with bench.running(engine):
        with pytest.raises(GeneratorFailedError, match="DigestMismatchError"):
            await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 10)
        assert len(engine.updates) == puller.MAX_ENGINE_MISMATCHES
        assert bench.store.reports == []
        assert (await bench.view()).state == generator_pb2.GENERATOR_STATE_FAILED


async def test_an_engine_failure_gives_all_samples_back_with_their_tokens(bench):
    engine = ScriptedEngine()
    first, second = bench.broker.submit(prompt("g", group_size=2))
    await bench.store.publish(0)
    async with bench.running(engine, max_concurrent_samples=2):
        await until(lambda: len(engine.requests) == 2)
        engine.say("g-0-1", span(5))
        engine.say("g-1-1", span(6, 7))
        await until(lambda: len(first.token_ids) == 1 and len(second.token_ids) == 2)
        engine.say("g-0-1", EngineStoppedError("died"))
        with pytest.raises(GeneratorFailedError):
            await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 10)
    assert [sample.finish_reason for sample in (first, second)] == [types_pb2.FINISH_REASON_ABORTED] * 2
    assert len(bench.broker.queue) == 2
    assert (first.token_ids, second.token_ids) == ([5], [6, 7])


async def test_a_hung_decode_is_noticed_and_gives_all_samples_back_with_their_tokens(bench):
    engine = ScriptedEngine()
    first, second = bench.broker.submit(prompt("g", group_size=2))
    await bench.store.publish(0)
    async with bench.running(engine, max_silence_s=1.0):
        await until(lambda: len(engine.requests) == 2)
        for token_id in range(5, 15):
            engine.say("g-0-1", span(token_id))
            engine.tokens_sampled += 1
            await asyncio.sleep(0.15)
        assert not bench.tasks[0].done(), "one that is slow is not hung"
        with pytest.raises(GeneratorFailedError, match="no token for"):
            await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 20)
    assert (bench.num_engine_failures("hung"), bench.num_engine_failures("failed")) == (1, 0)
    assert [sample.finish_reason for sample in (first, second)] == [types_pb2.FINISH_REASON_ABORTED] * 2
    assert (first.token_ids, second.token_ids) == (list(range(5, 15)), [])


async def test_failures_are_counted_over_restarts(bench):
    await bench.store.publish(0)
    for error, failed, hung in ((EngineStoppedError("died"), 1, 0), (EngineHungError("silent"), 1, 1)):
        async with bench.running(ScriptedEngine()):
            bench.generator.fail(error)
            with pytest.raises(GeneratorFailedError):
                await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 10)
            assert (bench.num_engine_failures("failed"), bench.num_engine_failures("hung")) == (failed, hung)
    async with bench.running(ScriptedEngine()):
        assert [bench.num_engine_failures(how) for how in ("failed", "hung", "killed")] == [1, 1, 0]


async def test_a_hung_decode_is_noticed_where_only_a_guest_waits(bench):
    engine = ScriptedEngine()
    await bench.store.publish(0)
    async with bench.running(engine, max_silence_s=0.4):
        await until(lambda: bench.generator.view().state == generator_pb2.GENERATOR_STATE_SERVING)
        request = GenerateRequest(
            request_id="guest", prompt_token_ids=(5,), sampling=SamplingSettings(max_new_tokens=9)
        )
        spans = bench.generator.unleased().decode(request, wait_s=20)
        token = asyncio.create_task(anext(spans))
        await until(lambda: "guest" in engine.requests)
        assert bench.broker.num_finished == 0
        with pytest.raises(GeneratorFailedError, match="no token for"):
            await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 20)
        token.cancel()
        await asyncio.gather(token, return_exceptions=True)
        await spans.aclose()


async def test_an_engine_that_stands_still_on_purpose_is_not_hung(bench):
    engine = PausableScriptedEngine()
    bench.broker.submit(prompt("g"))
    await bench.store.publish(0)
    async with bench.running(engine, max_silence_s=0.1):
        request = generator_pb2.PauseGeneratorRequest(is_paused=True)
        await until(lambda: bench.generator.view().state == generator_pb2.GENERATOR_STATE_SERVING)
        await call(bench.stub.PauseGenerator, request, peer="generator")
        await until(lambda: len(engine.requests) == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 0.5)


async def test_a_pull_that_was_overtaken_does_not_take_the_engine_back(bench, monkeypatch):
    engine, has_asked, may_go_on = ScriptedEngine(), asyncio.Event(), asyncio.Event()
    await bench.store.publish(0)
    async with bench.running(engine):
        await until(lambda: bench.generator.view().state == generator_pb2.GENERATOR_STATE_SERVING)
        await until(lambda: [update.policy_version for update in engine.updates] == [0])
        client = bench.generator._puller._client
        get_manifest = client.get_manifest

        async def get_slowly(version=None):
            manifest = await get_manifest(version)
            has_asked.set()
            await may_go_on.wait()
            return manifest

        monkeypatch.setattr(client, "get_manifest", get_slowly)
        request = generator_pb2.PullWeightsRequest()
        pulling = asyncio.create_task(call(bench.stub.PullWeights, request, peer="generator", timeout_s=30))
        await has_asked.wait()
        await bench.store.publish(1)
        await until(lambda: [update.policy_version for update in engine.updates] == [0, 1])
        may_go_on.set()
        assert (await pulling).policy_version == 1
        assert [update.policy_version for update in engine.updates] == [0, 1]


async def test_samples_hear_of_a_step_that_fails(tmp_path, monkeypatch):
    def fail(_decoder):
        raise RuntimeError("no memory")

    monkeypatch.setattr(transformers_engine.BatchDecoder, "step", fail)
    model = ServedModel(model_path=make_tiny_model(tmp_path / "model"), dtype="float32")
    engine = transformers_engine.TransformersEngine(TransformersEngineConfig(), model)
    await engine.start()
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingSettings(max_new_tokens=4))
    for complaint in ("engine died: RuntimeError: no memory", "not running"):
        with pytest.raises(EngineStoppedError, match=complaint):
            await anext(engine.generate(request))
    await engine.stop()


async def test_a_step_of_an_update_that_is_given_up_ends_before_the_next_one_begins(tmp_path, monkeypatch):
    began, may_end = threading.Event(), threading.Event()
    step = transformers_engine.BatchDecoder.step

    def slow_recomputation(decoder):
        if decoder.rows[0].num_decoded and decoder._cache is None:
            began.set()
            may_end.wait(timeout=30)
            decoder.rows[0].num_left = 1
        return step(decoder)

    monkeypatch.setattr(transformers_engine.BatchDecoder, "step", slow_recomputation)
    model = ServedModel(model_path=make_tiny_model(tmp_path / "model"), dtype="float32")
    engine = transformers_engine.TransformersEngine(TransformersEngineConfig(), model)
    await engine.start()
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingSettings(max_new_tokens=400))
    spans = engine.generate(request)
    await anext(spans)
    update = make_update(write_perturbed(model.model_path, tmp_path / "v1.safetensors", seed=1), policy_version=1)
    updating = asyncio.create_task(engine.update_weights(dataclasses.replace(update, is_recomputing=True)))
    await until(began.is_set)
    updating.cancel()
    await asyncio.wait({updating})
    other = asyncio.create_task(anext(engine.generate(dataclasses.replace(request, request_id="s"))))
    await until(lambda: engine.stats().num_waiting == 1)
    may_end.set()
    async with asyncio.timeout(30):
        assert [part.finish_reason async for part in spans][-1] is FinishReason.LENGTH
        assert (await other).policy_version == 1
    await engine.stop()


async def test_an_aborted_sample_leaves_the_batch_outside_the_event_loop(tmp_path, monkeypatch):
    threads = []
    remove = transformers_engine.BatchDecoder.remove

    def noted(decoder, request_id):
        threads.append(threading.current_thread())
        return remove(decoder, request_id)

    monkeypatch.setattr(transformers_engine.BatchDecoder, "remove", noted)
    model = ServedModel(model_path=make_tiny_model(tmp_path / "model"), dtype="float32")
    engine = transformers_engine.TransformersEngine(TransformersEngineConfig(), model)
    await engine.start()
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingSettings(max_new_tokens=400))
    spans = engine.generate(request)
    await anext(spans)
    await engine.abort("r")
    assert [part.finish_reason async for part in spans][-1] is FinishReason.ABORTED
    assert len(threads) == 1
    assert threading.main_thread() not in threads
    await engine.stop()


async def test_an_update_that_waits_for_its_turn_when_the_engine_stops_is_refused(tmp_path, monkeypatch):
    checked = []
    for name in ("verify_safetensors", "check_layout"):
        monkeypatch.setattr(transformers_engine, name, lambda *_arguments, **_settings: None)
    monkeypatch.setattr(transformers_engine, "check_update", lambda update, _base: checked.append(update))
    model = ServedModel(model_path=make_tiny_model(tmp_path / "model"), dtype="float32")
    engine = transformers_engine.TransformersEngine(TransformersEngineConfig(), model)
    await engine.start()
    update = WeightUpdate(policy_version=1, path=tmp_path, tensors=[], digest="")
    async with engine._between_steps:
        given_up, waited_for = (asyncio.create_task(engine.update_weights(update)) for _ in range(2))
        await until(lambda: len(checked) == 2)
        given_up.cancel()
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
    await stopping
    with pytest.raises(EngineStoppedError):
        await waited_for
    assert given_up.cancelled()


async def test_an_installation_that_hangs_is_noticed_and_one_that_takes_long_is_not(bench):
    engine = ScriptedEngine()
    await bench.store.publish(0)
    async with bench.running(engine, max_silence_s=0.8):
        await until(lambda: bench.generator.view().state == generator_pb2.GENERATOR_STATE_SERVING)
        await until(lambda: bench.generator.view().num_weight_updates == 1)
        engine.may_install.clear()
        engine.install_signs = 0
        await bench.store.publish(1)
        await until(lambda: len(engine.updates) == 2)
        for _ in range(12):
            engine.install_signs += 1
            await asyncio.sleep(0.15)
        assert not bench.tasks[0].done(), "one that is slow is not hung"
        with pytest.raises(GeneratorFailedError, match="without getting on"):
            await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 20)
    assert bench.num_engine_failures("hung") == 1


def test_workers_give_their_signs_through_a_file(tmp_path):
    signs, weights = InstallSigns(), tmp_path / "v1.safetensors"
    give_sign(str(weights))
    assert signs.current is None
    with signs.installing(weights):
        seen = signs.current
        os.utime(signs_file(weights), ns=(1, 1))
        assert signs.current != seen
        seen = signs.current
        give_sign(str(weights))
        assert signs.current != seen
    assert signs.current is None
    assert list(tmp_path.iterdir()) == []
