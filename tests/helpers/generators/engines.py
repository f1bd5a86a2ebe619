"""Engines of every kind over the tiny model, what they are asked to decode, and what the plain model says to that."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.generator.engine.engine import Engine, GenerateRequest, SamplingSettings, TokenSpan
from services.generator.engines.base_config import ServedModel
from services.generator.engines.emulated.emulated_engine import EmulatedEngine
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.transformers_engine import TransformersEngine
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.vllm_engine import VllmEngine
from tests.helpers.generators.emulated_spec import emulated_spec
from tests.helpers.models.tiny_model import MAX_CONTEXT, VOCAB_SIZE, load_tiny_model, make_update, write_perturbed

PROMPT = (5, 17, 30, 8, 21)
VLLM_WORKERS = {
    "vllm": {},
    "vllm, two tensor-parallel workers": {"tensor_parallel": 2},
    "vllm, two pipeline stages": {"pipeline_parallel": 2},
}
"""Keys of vLLM engines with one worker, and with two that each hold a part of the model."""
_request_numbers = itertools.count()


def vllm_workers(*, in_grids: Collection[str]) -> list[Any]:
    """Parameters of tests, a name each; those that only the grids try are marked."""
    return [
        pytest.param(name, marks=[pytest.mark.vllm, *[pytest.mark.grid] * (name in in_grids)]) for name in VLLM_WORKERS
    ]


def build_engine(name: str, model_path: Path) -> Engine:
    """An engine of a kind, not started."""
    model = ServedModel(model_path=model_path, dtype="float32")
    if name in VLLM_WORKERS:
        config = VllmEngineConfig(max_concurrent_samples=64, kv_cache_gib=0.125, **VLLM_WORKERS[name])
        return VllmEngine(config, model, stream_interval=4)
    if name == "transformers":
        return TransformersEngine(TransformersEngineConfig(max_concurrent_samples=64), model, stream_interval=4)
    # Slow enough that a sample is still under way when a test on a busy machine does something to it.
    spec = emulated_spec(token_s=1.5e-3, max_model_len=MAX_CONTEXT, vocab_size=VOCAB_SIZE)
    return EmulatedEngine(spec)


def make_request(**sampling: object) -> GenerateRequest:
    """A new request for a completion of PROMPT, 24 tokens unless said otherwise."""
    settings = SamplingSettings(**{"max_new_tokens": 24, **sampling})
    return GenerateRequest(request_id=f"r{next(_request_numbers)}", prompt_token_ids=PROMPT, sampling=settings)


async def collect(engine: Engine, request: GenerateRequest) -> list[TokenSpan]:
    """All spans of a request."""
    async with aclosing(engine.generate(request)) as spans:
        return [span async for span in spans]


def tokens_of(spans: list[TokenSpan]) -> list[int]:
    """Their token ids."""
    return [int(token_id) for span in spans for token_id in span.token_ids]


def logprobs_of(spans: list[TokenSpan]) -> np.ndarray:
    """Their log-probs."""
    return np.concatenate([span.logprobs for span in spans])


def versions_of(spans: list[TokenSpan]) -> list[int]:
    """The policy version of each of their tokens."""
    return [span.policy_version for span in spans for _ in span.token_ids]


async def take_perturbed(engine: Engine, model_path: Path, tmp_path: Path) -> Path:
    """Give the engine other weights of the next version; returns their file."""
    version = engine.policy_version + 1
    path = write_perturbed(model_path, tmp_path / f"v{version}.safetensors", seed=version)
    report = await engine.update_weights(make_update(path, policy_version=version))
    assert report.policy_version == version == engine.policy_version
    return path


async def take_initial(engine: Engine, model_path: Path) -> None:
    """Brings the shared engine back to weights the next test knows."""
    path = model_path / "model.safetensors"
    await engine.update_weights(make_update(path, policy_version=engine.policy_version + 1))


def recompute(
    model_path: Path, completion: list[int], *, weights: Path | None = None, temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of a completion in one forward pass of the plain model."""
    model = load_tiny_model(model_path, weights)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *completion]])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).numpy()


def recompute_over_old_cache(model_path: Path, completion: list[int], num_old: int, *, weights: Path) -> np.ndarray:
    """The same where the model took other weights after `num_old` tokens, and went on over its old KV cache."""
    tokens = [*PROMPT, *completion]
    boundary = len(PROMPT) + num_old - 1
    with torch.inference_mode():
        # The input that led to the first new token was the first one the new weights saw; all before it is old cache.
        first = load_tiny_model(model_path)(input_ids=torch.tensor([tokens[:boundary]]), use_cache=True)
        second = load_tiny_model(model_path, weights)(
            input_ids=torch.tensor([tokens[boundary:-1]]), past_key_values=first.past_key_values
        )
    logits = torch.cat([first.logits[0, len(PROMPT) - 1 :], second.logits[0]])
    logprobs = logits.log_softmax(dim=-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
    return logprobs.numpy()
