"""LoRA adapters in real engines: what they decode with is what the trainer's own model computes, in every mode."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from penstock.model.adapter_layout import BaseMismatchError, model_digest
from penstock.model.digests import WeightsMismatchError
from services.generator.engine.engine import Engine, EngineError, GenerateRequest, SamplingSettings, TokenSpan
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.transformers_engine import TransformersEngine
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.vllm_engine import VllmEngine
from services.trainer.batches.packing import Trajectory, pack_trajectories
from services.trainer.distributed.rank_backend import RankBackend
from tests.helpers.generators.engines import VLLM_WORKERS, logprobs_of, tokens_of, vllm_workers
from tests.helpers.models.adapters import adapter_update, another_base, fill, make_backend
from tests.helpers.models.tiny_model import make_tiny_model, make_update, write_perturbed
from tests.unit.trainer.builders import scores_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

PROMPT = (5, 17, 30, 8, 21)
TOLERANCE = 2e-5
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def backend(model_path: Path) -> RankBackend:
    torch.set_num_threads(1)
    return make_backend(model_path)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["transformers", *vllm_workers(in_grids=VLLM_WORKERS.keys() - {"vllm"})],
)
async def engine(request: pytest.FixtureRequest, model_path: Path) -> AsyncIterator[Engine]:
    built: Engine
    model = ServedModel(model_path=model_path, dtype="float32", max_lora_rank=4)
    if request.param in VLLM_WORKERS:
        config = VllmEngineConfig(max_concurrent_samples=8, kv_cache_gib=0.125, **VLLM_WORKERS[request.param])
        # A worker whose memory can be made to fail.
        with pytest.MonkeyPatch.context() as patch:
            extension = "tests.helpers.generators.flipping_worker.FlippingWorkerExtension"
            patch.setattr("services.generator.engines.vllm.process_setup._WORKER_EXTENSION", extension)
            built = VllmEngine(config, model, stream_interval=4)
            await built.start()
    else:
        built = TransformersEngine(TransformersEngineConfig(max_concurrent_samples=64), model, stream_interval=4)
        await built.start()
    yield built
    await built.stop()


async def collect(
    engine: Engine, *, max_new_tokens: int = 24, on_token: asyncio.Event | None = None
) -> list[TokenSpan]:
    sampling = SamplingSettings(max_new_tokens=max_new_tokens)
    request = GenerateRequest(request_id=f"a{next(_numbers)}", prompt_token_ids=PROMPT, sampling=sampling)
    collected = []
    async with aclosing(engine.generate(request)) as spans:
        async for span in spans:
            collected.append(span)
            if on_token is not None:
                on_token.set()
    return collected


def trained_logprobs(backend: RankBackend, token_ids: list[int]) -> np.ndarray:
    """Of a completion, by the trainer's forward pass."""
    length = len(PROMPT) + len(token_ids)
    trajectory = Trajectory(
        token_ids=np.asarray([*PROMPT, *token_ids], np.int32),
        loss_mask=np.arange(length) >= len(PROMPT),
        behavior_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
    )
    (pack,) = pack_trajectories([trajectory], max_pack_tokens=length)
    return scores_of(backend, pack)


async def take(engine: Engine, backend: RankBackend, folder: Path, **changes: object):
    """Brings another adapter into backend and engine."""
    version = engine.policy_version + 1
    fill(backend, seed=version)
    update = dataclasses.replace(adapter_update(backend, folder, policy_version=version), **changes)
    report = await engine.update_weights(update)
    assert (report.policy_version, report.digest) == (version, update.digest)
    assert engine.policy_version == version
    return report


async def test_log_probs_are_those_of_the_trainers_adapted_model(engine, backend, tmp_path):
    unadapted = None
    for _ in range(2):
        await take(engine, backend, tmp_path)
        spans = await collect(engine)
        expected = trained_logprobs(backend, tokens_of(spans))
        np.testing.assert_allclose(logprobs_of(spans), expected, atol=TOLERANCE)
        with backend._trained.as_reference() as base, pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "_model", base)
            unadapted = trained_logprobs(backend, tokens_of(spans))
        assert np.abs(unadapted - expected).max() > 0.1, "the adapter changes nothing"


@pytest.mark.parametrize("is_recomputing", [False, True], ids=["keep", "recompute"])
async def test_a_sample_under_way_goes_on_with_the_new_adapter(engine, backend, tmp_path, is_recomputing):
    await take(engine, backend, tmp_path)
    old_version, has_begun = engine.policy_version, asyncio.Event()
    sample = asyncio.create_task(collect(engine, max_new_tokens=450, on_token=has_begun))
    await asyncio.wait_for(has_begun.wait(), 60)
    old = {name: tensor.clone() for name, tensor in backend.state_tensors().items()}
    # So that it cannot end before the update.
    await engine.pause()
    report = await take(engine, backend, tmp_path, is_recomputing=is_recomputing)
    await engine.resume()
    spans = await sample
    versions = [span.policy_version for span in spans for _ in span.token_ids]
    assert versions == sorted(versions)
    assert set(versions) == {old_version, engine.policy_version}
    token_ids, found, begin = tokens_of(spans), logprobs_of(spans), versions.index(engine.policy_version)
    expected = trained_logprobs(backend, token_ids)
    if is_recomputing:
        assert report.num_recomputed_tokens > 0
        np.testing.assert_allclose(found[begin:], expected[begin:], atol=TOLERANCE)
    with torch.no_grad():
        for name, tensor in backend.state_tensors().items():
            tensor.copy_(old[name])
    before = trained_logprobs(backend, token_ids)
    np.testing.assert_allclose(found[:begin], before[:begin], atol=TOLERANCE)
    assert np.abs(found[begin:] - before[begin:]).max() > 0.1, "it goes on with the old adapter"


async def test_an_adapter_of_another_base_is_refused_by_both_digests_and_the_engine_goes_on(
    engine, backend, tmp_path, model_path
):
    await take(engine, backend, tmp_path)
    version = engine.policy_version
    other = another_base(backend.adapter)
    with pytest.raises(BaseMismatchError) as refusal:
        await take(engine, backend, tmp_path, adapter=other)
    assert other.base_digest in str(refusal.value)
    assert model_digest(model_path) in str(refusal.value)
    spans = await collect(engine)
    assert {span.policy_version for span in spans} == {version}


async def test_what_the_engine_was_not_started_for_is_refused_untouched(engine, backend, tmp_path, model_path):
    await take(engine, backend, tmp_path)
    version = engine.policy_version
    whole = write_perturbed(model_path, tmp_path / "whole.safetensors", seed=1)
    with pytest.raises(EngineError, match="max_lora_rank"):
        await engine.update_weights(make_update(whole, policy_version=version + 1))
    higher = copy.deepcopy(backend.adapter)
    higher.rank = 5
    with pytest.raises(EngineError, match="rank 5"):
        await take(engine, backend, tmp_path, adapter=higher)
    folder = tmp_path / "half"
    folder.mkdir()
    update = adapter_update(backend, folder, policy_version=version + 1)
    tensors = load_file(update.path)
    lacking = next(iter(tensors))
    del tensors[lacking]
    save_file(tensors, tmp_path / "half.safetensors")
    half = make_update(tmp_path / "half.safetensors", policy_version=version + 1)
    with pytest.raises(WeightsMismatchError, match=lacking.replace(".", r"\.")):
        await engine.update_weights(dataclasses.replace(half, adapter=backend.adapter))
    assert {span.policy_version for span in await collect(engine)} == {version}


async def test_one_flipped_bit_in_the_engines_adapter_is_refused_and_the_next_one_taken(
    engine, backend, tmp_path, monkeypatch
):
    await take(engine, backend, tmp_path)
    name = next(name for name in backend.state_tensors() if name.endswith("layers.1.mlp.gate_proj.lora_B.weight"))
    if isinstance(engine, VllmEngine):
        await engine._llm.collective_rpc("penstock_flip_next", args=(name,))
    else:
        flip_next(monkeypatch, name)
    with pytest.raises(WeightsMismatchError, match=r"layers\.1\.mlp\.gate_proj\.lora_B"):
        await take(engine, backend, tmp_path)
    sample = asyncio.create_task(collect(engine))
    (tmp_path / "again").mkdir()
    report = await take(engine, backend, tmp_path / "again")
    spans = await asyncio.wait_for(sample, 60)
    assert {span.policy_version for span in spans} == {report.policy_version}, "the refused adapter sampled"
    np.testing.assert_allclose(logprobs_of(spans), trained_logprobs(backend, tokens_of(spans)), atol=TOLERANCE)


def flip_next(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next file is read with one bit of `name` flipped, once."""
    from services.generator.engines.transformers import loaded_weights

    true_tensors, passes = loaded_weights._tensors, itertools.count()

    def flipping(path):
        is_first = next(passes) == 0
        for other, tensor in true_tensors(path):
            if is_first and other == name:
                tensor.view(torch.uint8).view(-1)[101] ^= 1
            yield other, tensor

    monkeypatch.setattr(loaded_weights, "_tensors", flipping)


@pytest.mark.parametrize("spoil", ["slot", "padding", "unadapted"])
@pytest.mark.vllm
async def test_every_number_of_a_vllm_slot_is_read_back(spoil):
    from services.generator.engines.vllm.worker import lora_slot

    module = lora_slot.BaseLayerWithLoRA()
    module.tp_size = 1
    module.lora_a_stacked, module.lora_b_stacked = (torch.zeros(1, 1, 8, 6),), (torch.zeros(1, 1, 5, 8),)
    a, b = torch.randn(4, 6), torch.randn(5, 4)
    tensors = {"base_model.model.m.lora_A.weight": a, "base_model.model.m.lora_B.weight": b}
    module.lora_a_stacked[0][0, 0, :4], module.lora_b_stacked[0][0, 0, :, :4] = a, b * 3.0
    assert lora_slot._holds(module, ["m"], tensors, 3.0)
    if spoil == "unadapted":
        assert not lora_slot._holds(module, ["m"], {}, 3.0)
        return
    module.lora_b_stacked[0][0, 0, 4, 3 if spoil == "slot" else 7] += 1e-3
    assert not lora_slot._holds(module, ["m"], tensors, 3.0)
