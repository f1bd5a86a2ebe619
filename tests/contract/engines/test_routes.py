"""Routes that a real engine records, replayed by the trainer on the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from penstock.model.routers import Routers, read_routers
from penstock.wire.routes import Routes
from services.generator.engine.engine import Engine, GenerateRequest, SamplingSettings, TokenSpan
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.transformers_engine import TransformersEngine
from services.generator.engines.vllm.config import VllmEngineConfig
from services.trainer.batches.packing import pack_trajectories
from services.trainer.batches.training_sample import TrainingSample, trajectory_of
from tests.helpers.models.model_families import save_tiny
from tests.helpers.models.tiny_model import make_update
from tests.helpers.waiting import until
from tests.unit.trainer.distributed.test_rank_backend import build_backend

PROMPTS = (tuple(range(5, 45)), (9, 10), (11, 12, 13, 14, 15, 16))


def request(
    name: str, prompt: Sequence[int], prefix: Sequence[int] = (), *, num_tokens: int = 8, seed: int = 3
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        prefix_token_ids=tuple(prefix),
        sampling=SamplingSettings(max_new_tokens=num_tokens, seed=seed),
        has_routes=True,
    )


async def spans_of(engine: Engine, asked: GenerateRequest) -> list[TokenSpan]:
    return [span async for span in engine.generate(asked)]


def joined(spans: Sequence[TokenSpan]) -> Routes:
    routes = [span.routes for span in spans if span.routes is not None]
    assert len(routes) == len(spans)
    return np.concatenate(routes)


async def decode(engine: Engine, asked: GenerateRequest) -> tuple[list[int], Routes]:
    spans = await spans_of(engine, asked)
    return [token for span in spans for token in span.token_ids.tolist()], joined(spans)


async def sampled(engine: Engine, index: int, prompt: Sequence[int]) -> TrainingSample:
    asked = request(str(index), prompt, num_tokens=32, seed=index)
    spans = await spans_of(engine, asked)
    tokens = np.concatenate([span.token_ids for span in spans])
    return TrainingSample(
        group_id="g",
        sample_index=index,
        prompt_token_ids=np.array(prompt, np.int32),
        completion_token_ids=tokens,
        behavior_logprobs=np.concatenate([span.logprobs for span in spans]),
        policy_versions=np.zeros(len(tokens), np.int64),
        reward=1.0,
        routes=joined(spans),
    )


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


async def check_an_update(engine: Engine, path: Path, routers: Routers) -> None:
    """Tokens keep the rows that sampled them when their positions are computed again under new weights."""
    update = replace(make_update(perturbed(path), policy_version=1), is_recomputing=True)
    sample = asyncio.create_task(spans_of(engine, request("long", PROMPTS[1], num_tokens=100)))
    seen = engine.stats().tokens_generated
    await until(lambda: engine.stats().tokens_generated > seen + 8)
    await engine.update_weights(update)
    spans = await sample
    whole = [*PROMPTS[1], *(token for span in spans for token in span.token_ids.tolist())]
    old = sum(len(span.token_ids) for span in spans if span.policy_version == 0)
    assert {span.policy_version for span in spans} == {0, 1}
    rows, num_old = joined(spans), len(PROMPTS[1]) - 1 + old
    before, after = (chosen(folder, routers, whole)[:-1] for folder in (path, path / "perturbed"))
    assert np.array_equal(rows[:num_old], before[:num_old])
    assert np.array_equal(rows[num_old:], after[num_old:])
    assert not np.array_equal(before[:num_old], after[:num_old])


def perturbed(path: Path) -> Path:
    """The weights of a further version, as its only file in a folder beside the model's configuration."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(path / "perturbed")
    file = path / "perturbed" / "update.safetensors"
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, file, metadata={"format": "pt"}
    )
    return file


async def check_routes(engine: Engine, path: Path) -> None:
    routers = read_routers(path, field="records_routes")
    await engine.start()
    try:
        found = await asyncio.gather(*(decode(engine, request(str(i), ids)) for i, ids in enumerate(PROMPTS)))
        # A prompt that was decoded before, and a sample that goes on from a prefix.
        again = await decode(engine, request("again", PROMPTS[0]))
        continued, more = await decode(engine, request("more", PROMPTS[0], found[0][0][:5]))
        await check_an_update(engine, path, routers)
    finally:
        await engine.stop()
    for prompt, (tokens, routes) in zip((*PROMPTS, PROMPTS[0]), (*found, again), strict=True):
        expected = chosen(path, routers, [*prompt, *tokens])
        assert routes.dtype == np.uint8
        assert routes.shape == (len(prompt) + len(tokens) - 1, 2, 2)
        assert np.array_equal(routes, expected[:-1])
    # After a prefix, only the positions that are sampled from.
    whole = [*PROMPTS[0], *found[0][0][:5], *continued]
    assert np.array_equal(more, chosen(path, routers, whole)[-1 - len(continued) : -1])


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
async def test_an_engine_records_the_experts_of_every_position_but_the_last(family: str, tmp_path: Path) -> None:
    path = save_tiny(family, tmp_path)
    served = ServedModel(model_path=path, dtype="float32", records_routes=True)
    # The second and third sample join a batch under way, which is then computed again.
    await check_routes(
        TransformersEngine(TransformersEngineConfig(max_concurrent_samples=4), served, stream_interval=3), path
    )


@pytest.mark.vllm
@pytest.mark.timeout(240)
async def test_vllm_records_the_same(tmp_path: Path) -> None:
    from services.generator.engines.vllm.vllm_engine import VllmEngine

    path = save_tiny("qwen3_moe", tmp_path, head_dim=32, moe_intermediate_size=32, hidden_size=64)
    served = ServedModel(model_path=path, dtype="float32", records_routes=True)
    config = VllmEngineConfig(max_concurrent_samples=4, kv_cache_gib=0.0625)
    await check_routes(VllmEngine(config, served, stream_interval=3), path)


@pytest.mark.parametrize("relative_noise", [0.01, 0.1])
async def test_replay_at_least_halves_the_mismatch_of_a_noisy_engine(relative_noise: float, tmp_path: Path) -> None:
    """The figures of docs/training.md: the engine's routers read hidden states with noise of this size."""
    path = save_tiny(
        "qwen3_moe", tmp_path, num_experts=16, num_experts_per_tok=4, num_hidden_layers=4, norm_topk_prob=True
    )
    served = ServedModel(model_path=path, dtype="float32", records_routes=True)
    engine = TransformersEngine(TransformersEngineConfig(max_concurrent_samples=32), served)
    await engine.start()
    torch.manual_seed(1)

    def disturb(_router: object, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        size = given[0].square().mean(-1, keepdim=True).sqrt()
        return (given[0] + relative_noise * size * torch.randn_like(given[0]),)

    for name in read_routers(path, field="records_routes").module_names:
        engine._model.get_submodule(name).register_forward_pre_hook(disturb)
    prompts = np.random.default_rng(0).integers(3, 96, (32, 8)).tolist()
    try:
        samples = await asyncio.gather(*(sampled(engine, index, prompt) for index, prompt in enumerate(prompts)))
    finally:
        await engine.stop()
    mismatch_kl = {}
    for replays in (False, True):
        backend = build_backend(path, replays_routes=replays)
        [pack] = pack_trajectories([trajectory_of(sample, 1.0) for sample in samples], max_pack_tokens=4096)
        totals = backend.forward_backward(pack)
        mismatch_kl[replays] = totals.sums["mismatch_kl"] / totals.num_tokens
    assert mismatch_kl[False] > 1e-4
    assert mismatch_kl[True] < 0.5 * mismatch_kl[False]
