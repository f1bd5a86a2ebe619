"""The vLLM engine on a CUDA GPU: CUDA graphs, layerwise reload, device-side attestation. Skipped where there is none.

`test_engines.py` runs on whatever vLLM was installed for; this holds only on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from services.generator.engine.engine import GenerateRequest, SamplingSettings, TokenSpan
from services.generator.engines.base_config import ServedModel
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.vllm_engine import VllmEngine
from tests.helpers.models.tiny_model import load_tiny_model, make_tiny_model, make_update, write_perturbed
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and vllm built for it"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]
PROMPT = (5, 17, 30, 8, 21)
TOLERANCE = 2e-2
"""Nats between the kernels of a GPU and plain float32."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_path: Path) -> AsyncIterator[VllmEngine]:
    built = VllmEngine(
        VllmEngineConfig(gpu_memory_utilization=0.3),
        ServedModel(model_path=model_path, dtype="float32"),
        stream_interval=2,
    )
    await built.start()
    yield built
    await built.stop()


async def collect(engine: VllmEngine, name: str, num_tokens: int) -> list[TokenSpan]:
    sampling = SamplingSettings(max_new_tokens=num_tokens)
    request = GenerateRequest(request_id=name, prompt_token_ids=PROMPT, sampling=sampling)
    async with aclosing(engine.generate(request)) as spans:
        return [span async for span in spans]


def difference(model_path: Path, spans: list[TokenSpan], weights: Path | None = None) -> float:
    """Largest difference, in nats, between the engine's log-probs and those of the plain model."""
    completion = [int(token_id) for span in spans for token_id in span.token_ids]
    with torch.inference_mode():
        model = load_tiny_model(model_path, weights)
        logits = model(input_ids=torch.tensor([[*PROMPT, *completion]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).numpy()
    return float(np.abs(np.concatenate([span.logprobs for span in spans]) - expected).max())


async def test_log_probs_before_and_after_updates_are_those_of_the_model(
    engine: VllmEngine, model_path: Path, tmp_path: Path
) -> None:
    assert difference(model_path, await collect(engine, "before", 40)) < TOLERANCE
    for version in (1, 2):
        path = write_perturbed(model_path, tmp_path / f"{version}.safetensors", seed=version)
        await engine.update_weights(make_update(path, policy_version=engine.policy_version + 1))
        assert difference(model_path, await collect(engine, f"after-{version}", 40), path) < TOLERANCE


async def test_samples_live_through_an_update(engine: VllmEngine, model_path: Path, tmp_path: Path) -> None:
    old = engine.policy_version
    sampled = engine.stats().tokens_sampled
    tasks = [asyncio.create_task(collect(engine, f"long-{index}", 480)) for index in range(4)]
    await until(lambda: engine.stats().tokens_sampled > sampled, timeout_s=60)
    path = write_perturbed(model_path, tmp_path / "v.safetensors", seed=7)
    await engine.update_weights(make_update(path, policy_version=old + 1))
    for spans in await asyncio.gather(*tasks):
        versions = [span.policy_version for span in spans]
        assert versions == sorted(versions)
        assert set(versions) <= {old, old + 1}


async def test_attestation_names_each_tensor_that_differs(engine: VllmEngine, model_path: Path, tmp_path: Path) -> None:
    first = model_path / "model.safetensors"
    await engine.update_weights(make_update(first, policy_version=engine.policy_version + 1))
    weights = load_file(first)
    for name, tensor in weights.items():
        one_off = tensor.clone()
        one_off.view(-1)[-1] += 1e-6
        save_file({**weights, name: one_off}, tmp_path / "one_off.safetensors")
        tied = {"lm_head.weight"} if name == "model.embed_tokens.weight" else set()
        assert set(await engine._attest([tmp_path / "one_off.safetensors"], weights)) - tied == {name}
