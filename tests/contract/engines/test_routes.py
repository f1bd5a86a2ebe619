"""Routes that a real engine records, replayed by the trainer on the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.model.routers import Routers, read_routers
from penstock.wire.routes import Routes
from services.generator.engine.engine import GenerateRequest, SamplingSettings, TokenSpan
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.transformers_engine import TransformersEngine
from tests.helpers.models.model_families import save_tiny

PROMPTS = ((5, 6, 7, 8), (9, 10), (11, 12, 13, 14, 15, 16))


def request(name: str, prompt: Sequence[int], prefix: Sequence[int] = (), *, num_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        prefix_token_ids=tuple(prefix),
        sampling=SamplingSettings(max_new_tokens=num_tokens, seed=3),
        has_routes=True,
    )


async def decode(engine: TransformersEngine, asked: GenerateRequest) -> tuple[list[int], Routes]:
    spans: list[TokenSpan] = [span async for span in engine.generate(asked)]
    routes = [span.routes for span in spans if span.routes is not None]
    assert len(routes) == len(spans)
    return [token for span in spans for token in span.token_ids.tolist()], np.concatenate(routes)


def chosen(path: Path, routers: Routers, token_ids: Sequence[int]) -> Routes:
    """What the routers of a plain model choose in one pass, [T, layers, k]."""
    model, layers = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), {}

    def note(place: int, _router: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        layers[place] = output[2]

    for place, name in enumerate(routers.module_names):
        model.get_submodule(name).register_forward_hook(partial(note, place))
    with torch.no_grad():
        model(input_ids=torch.tensor([list(token_ids)]))
    return torch.stack([layers[place] for place in range(len(layers))], dim=1).numpy()


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
async def test_an_engine_records_the_experts_of_every_position_but_the_last(family: str, tmp_path: Path) -> None:
    path = save_tiny(family, tmp_path)
    routers = read_routers(path, field="records_routes")
    served = ServedModel(model_path=path, dtype="float32", records_routes=True)
    # The second and third sample join a batch under way, which is then computed again.
    engine = TransformersEngine(TransformersEngineConfig(max_concurrent_samples=4), served, stream_interval=3)
    await engine.start()
    try:
        found = await asyncio.gather(*(decode(engine, request(str(i), ids)) for i, ids in enumerate(PROMPTS)))
        continued, more = await decode(engine, request("more", PROMPTS[0], found[0][0][:5]))
    finally:
        await engine.stop()
    for prompt, (tokens, routes) in zip(PROMPTS, found, strict=True):
        expected = chosen(path, routers, [*prompt, *tokens])
        assert routes.dtype == np.uint8
        assert routes.shape == (len(prompt) + len(tokens) - 1, 2, 2)
        assert np.array_equal(routes, expected[:-1])
    # After a prefix, only the positions that are sampled from.
    whole = [*PROMPTS[0], *found[0][0][:5], *continued]
    assert np.array_equal(more, chosen(path, routers, whole)[-1 - len(continued) : -1])
