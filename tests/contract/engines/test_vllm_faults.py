"""A whole generator with a real vLLM engine that is damaged: its weights, its process, its progress."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager

import pytest

from penstock.v1 import generator_pb2, types_pb2
from services.generator.engine.model_files import load_text_decoder
from services.generator.engines.base_config import ServedModel
from services.generator.engines.vllm import process_setup, vllm_engine
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.vllm_engine import VllmEngine
from services.generator.generator import GeneratorFailedError
from tests.contract.generator.test_generator import Bench
from tests.helpers.brokers.scripted_generation import prompt
from tests.helpers.generators import sent_texts
from tests.helpers.models.tiny_model import make_tiny_model, write_perturbed
from tests.helpers.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ABORTED = types_pb2.FINISH_REASON_ABORTED
NUM_SAMPLES = 4


@pytest.fixture
async def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "STOP_TIMEOUT_S", 1.0)
    made = Bench(tmp_path)
    make_tiny_model(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        # Samples that are as long as they may be: no token ends them.
        path = tmp_path / "model" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    async with made.store.serving_content():
        yield made


async def publish(bench, version):
    path = write_perturbed(bench.tmp_path / "model", bench.store.directory / f"{version}.safetensors", seed=version)
    return await bench.store.publish_file(path, policy_version=version)


@asynccontextmanager
async def running(bench, **settings):
    engine = VllmEngine(
        VllmEngineConfig(kv_cache_gib=0.0625),
        ServedModel(model_path=bench.tmp_path / "model", dtype="float32"),
        stream_interval=2,
    )
    async with bench.running(engine, **settings):
        yield engine


def submit_long(bench, group_id="g"):
    return bench.broker.submit(prompt(group_id, max_new_tokens=480, group_size=NUM_SAMPLES))


def engine_process(engine):
    (process,) = engine._llm.engine_core.resources.engine_manager.processes
    return process


def has_gone_on(samples, before):
    return all(len(sample.token_ids) > len(prefix) + 4 for sample, prefix in zip(samples, before, strict=True))


async def test_a_killed_and_a_hung_engine_give_samples_back_and_a_fresh_one_goes_on_with_the_newest_version(bench):
    samples = submit_long(bench)
    await publish(bench, 0)
    async with running(bench) as engine:
        await until(lambda: all(len(sample.token_ids) > 4 for sample in samples), timeout_s=400)
        os.kill(engine_process(engine).pid, signal.SIGKILL)
        with pytest.raises(GeneratorFailedError):
            await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 20)
        assert [sample.finish_reason for sample in samples] == [ABORTED] * NUM_SAMPLES
    before = [list(sample.token_ids) for sample in samples]
    await publish(bench, 1)
    async with running(bench, max_silence_s=2.0) as engine:
        await until(lambda: has_gone_on(samples, before), timeout_s=400)
        process = engine_process(engine)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(GeneratorFailedError, match="no token for"):
            await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 20)
        assert (await bench.view()).state == generator_pb2.GENERATOR_STATE_FAILED
    await until(lambda: not process.is_alive())
    for sample, prefix in zip(samples, before, strict=True):
        assert sample.finish_reason == ABORTED
        assert sample.token_ids[: len(prefix)] == prefix
        assert set(sample.versions[: len(prefix)]) == {0}
        assert set(sample.versions[len(prefix) :]) == {1}


async def test_a_flipped_byte_is_refused_and_running_out_of_memory_gives_samples_back(bench, monkeypatch):
    """Three subjects on one engine: also what it sends as text while versions change."""
    monkeypatch.setattr(
        process_setup, "_WORKER_EXTENSION", "tests.helpers.generators.exhausted_worker.ExhaustedWorkerExtension"
    )
    sent_texts.cut_characters(bench.tmp_path / "model")
    bench.text = load_text_decoder(bench.tmp_path / "model", is_tokenizer_needed=True)
    samples = submit_long(bench)
    await publish(bench, 0)
    async with running(bench) as engine:
        await until(lambda: all(len(sample.token_ids) > 4 for sample in samples), timeout_s=400)
        # A packed layer: what is read back is what its kernel multiplies by.
        await engine._llm.collective_rpc("penstock_flip_next", args=("model.layers.1.mlp.down_proj.weight",))
        manifest = await publish(bench, 1)
        await until(lambda: bench.generator._held.is_trusted is False)
        assert [report.policy_version for report in bench.store.reports] == [0]
        await until(lambda: bench.store.reports[-1].policy_version == 1)
        assert bench.store.reports[-1].digest == manifest.digest
        assert (await bench.view()).num_weights_refused == 1
        await until(lambda: bench.broker.num_finished == NUM_SAMPLES, timeout_s=60)
        assert all(sample.versions == sorted(sample.versions) for sample in samples)
        assert all(sample.num_leases == 1 and len(sample.token_ids) == 480 for sample in samples)

        said = sent_texts.submit(bench)
        await until(lambda: bench.broker.num_finished == NUM_SAMPLES + len(said), timeout_s=60)
        await sent_texts.assert_said_by_their_tokens(said, bench.tmp_path / "model")

        lost = submit_long(bench, "lost")
        await until(lambda: all(len(sample.token_ids) > 4 for sample in lost), timeout_s=60)
        # A step that got what it asked for would go on, and nothing below would happen.
        await engine._llm.collective_rpc("penstock_exhaust")
        with pytest.raises(GeneratorFailedError, match="the vLLM engine process died"):
            await asyncio.wait_for(asyncio.shield(bench.tasks[0]), 60)
        assert (await bench.view()).state == generator_pb2.GENERATOR_STATE_FAILED
    assert (bench.num_engine_failures("failed"), bench.num_engine_failures("hung")) == (1, 0)
    assert [sample.finish_reason for sample in lost] == [ABORTED] * NUM_SAMPLES
    assert all(len(sample.token_ids) > 4 for sample in lost)
