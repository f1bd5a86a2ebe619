"""Mixtures of experts in a real vLLM engine: loaded, attested, updated in flight, in both forms that files have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3MoeConfig

from penstock.model.digests import WeightsMismatchError
from services.generator.engines.base_config import ServedModel
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.vllm_engine import VllmEngine
from tests.helpers.generators.engines import PROMPT, collect, logprobs_of, make_request, tokens_of, versions_of
from tests.helpers.models.tiny_model import EOS_ID, MAX_CONTEXT, VOCAB_SIZE, make_tokenizer, make_update
from tests.helpers.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "eos_token_id": EOS_ID,
    "dtype": "float32",
}
CONFIGS = {
    # An expert's width is a multiple of 32 for one, and padded in vLLM for the other.
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=32, moe_intermediate_size=32, intermediate_size=128, norm_topk_prob=True
    ),
    "olmoe": OlmoeConfig(**SHAPE, intermediate_size=48),
}
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("olmoe", marks=pytest.mark.grid)])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_path: Path) -> AsyncIterator[VllmEngine]:
    model = ServedModel(model_path=model_path, dtype="float32")
    built = VllmEngine(VllmEngineConfig(max_concurrent_samples=16, kv_cache_gib=0.0625), model, stream_interval=4)
    await built.start()
    yield built
    await built.stop()


def perturbed(model_path: Path, seed: int):
    """The model after a step: its state has stacked experts, its files one by one."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def stacked_file(model, path: Path) -> Path:
    """As a trainer publishes it."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def expected_logprobs(model, completion: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *completion]])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()


async def install(engine: VllmEngine, path: Path) -> None:
    version = engine.policy_version + 1
    assert (await engine.update_weights(make_update(path, policy_version=version))).policy_version == version


async def test_versions_with_stacked_experts_are_installed_in_flight(engine, model_path, tmp_path):
    first = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    before = await collect(engine, make_request(max_new_tokens=100))
    np.testing.assert_allclose(logprobs_of(before), expected_logprobs(first, tokens_of(before)), atol=TOLERANCE)
    sample = asyncio.create_task(collect(engine, make_request(max_new_tokens=400)))
    seen = engine.stats().tokens_generated
    await until(lambda: engine.stats().tokens_generated > seen + 8)
    model = perturbed(model_path, 1)
    await install(engine, stacked_file(model, tmp_path / "v1.safetensors"))
    assert set(versions_of(await sample)) == {engine.policy_version - 1, engine.policy_version}
    after = await collect(engine, make_request(max_new_tokens=100))
    np.testing.assert_allclose(logprobs_of(after), expected_logprobs(model, tokens_of(after)), atol=TOLERANCE)
    assert np.abs(expected_logprobs(first, tokens_of(after)) - logprobs_of(after)).max() > 0.1
    # Back to the model's own file, which names every expert.
    await install(engine, model_path / "model.safetensors")
    again = await collect(engine, make_request(max_new_tokens=100))
    np.testing.assert_allclose(logprobs_of(again), expected_logprobs(first, tokens_of(again)), atol=TOLERANCE)


async def test_attestation_names_each_tensor_that_differs_in_both_forms(engine, model_path, tmp_path):
    await install(engine, model_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    stacked = load_file(stacked_file(model, tmp_path / "stacked.safetensors"))
    for weights in (load_file(model_path / "model.safetensors"), stacked):
        for name, tensor in weights.items():
            one_off = tensor.clone()
            one_off.view(-1)[-1] += 1e-6
            save_file({**weights, name: one_off}, tmp_path / "one_off.safetensors")
            assert await engine._attest([tmp_path / "one_off.safetensors"], weights) == [name]
        assert await engine._attest([tmp_path / "stacked.safetensors"], stacked) == []


async def test_another_number_of_experts_is_refused_untouched(engine, model_path, tmp_path):
    await install(engine, model_path / "model.safetensors")
    version = engine.policy_version
    tensors = load_file(stacked_file(perturbed(model_path, 2), tmp_path / "whole.safetensors"))
    name = "model.layers.1.mlp.experts.down_proj"
    save_file({**tensors, name: tensors[name][:3].clone()}, tmp_path / "three.safetensors")
    with pytest.raises(WeightsMismatchError, match=r"model\.layers\.1\.mlp\.experts\.3\.down_proj"):
        await engine.update_weights(make_update(tmp_path / "three.safetensors", policy_version=version + 1))
    assert set(versions_of(await collect(engine, make_request()))) == {version}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_packed_experts_are_unpacked_exactly(dtype):
    from vllm._custom_ops import cpu_prepack_moe_weight

    from services.generator.engines.vllm.worker.experts import _packed_order

    weight = torch.randn(1, 96, 320).to(dtype)
    unpacked = torch.empty(96 * 320, dtype=dtype)
    unpacked[_packed_order((96, 320), dtype, "vec")] = cpu_prepack_moe_weight(weight, "vec").view(-1)
    assert torch.equal(unpacked.view(96, 320), weight[0])
