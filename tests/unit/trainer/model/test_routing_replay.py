"""Replayed routes: the recorded experts count, the router learns, and nothing else is affected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import linear

from penstock.errors import InvalidFieldError
from penstock.wire.routes import RoutingShape
from penstock.wire.trajectory_groups import Sample, make_group, make_prompt
from services.trainer.batches.group_decoder import training_samples
from services.trainer.batches.packing import Pack, Trajectory, divide, pack_trajectories
from services.trainer.batches.training_sample import trajectory_of
from services.trainer.config import TrainingConfig
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.distributed.rank_worker import decoded, encoded
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.run_sections import LoraSection
from tests.helpers.models.model_families import save_tiny
from tests.unit.trainer.builders import build_sample, save_tiny_qwen2
from tests.unit.trainer.distributed.test_rank_backend import build_backend, gradients

LAYERS, EXPERTS, CHOSEN = 2, 4, 2


@pytest.fixture(scope="module", params=["qwen3_moe", "olmoe"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("model"), norm_topk_prob=request.param == "qwen3_moe")


def trajectories(count: int = 3, *, seed: int = 0) -> list[Trajectory]:
    """Samples of unlike lengths with arbitrary, distinct experts for each token."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        num_rows = 3 + 4 + 2 * index - 1
        routes = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (num_rows, LAYERS, 1)), axis=-1)
        sample = build_sample(index=index, num_tokens=4 + 2 * index, routes=routes[..., :CHOSEN].copy())
        made.append(trajectory_of(sample, 1.0))
    return made


def packed(members: list[Trajectory]) -> Pack:
    [pack] = pack_trajectories(members, max_pack_tokens=64)
    return pack


@contextmanager
def forced(backend: RankBackend, routes_tlk: np.ndarray) -> Iterator[None]:
    """The same experts by other means: the routers' modules compute another function."""
    found = []
    for place in range(LAYERS):
        router = backend._model.get_submodule(f"model.layers.{place}.mlp.gate")

        def forward(hidden: torch.Tensor, *, place: int = place, router: Any = router) -> tuple[torch.Tensor, ...]:
            logits = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            ids = torch.from_numpy(routes_tlk[:, place].astype(np.int64))
            probabilities = logits.float().softmax(-1)
            weights = torch.stack([row[chosen] for row, chosen in zip(probabilities, ids, strict=True)])
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, ids

        found.append(router)
        router.forward = forward
    try:
        yield
    finally:
        for router in found:
            del router.forward


@pytest.mark.parametrize("checkpoints", [False, True])
def test_the_recorded_experts_are_taken_and_the_router_learns(directory: Path, checkpoints: bool) -> None:
    pack = packed(trajectories())
    assert pack.routes is not None
    backend = build_backend(directory, replays_routes=True, gradient_checkpointing=checkpoints)
    totals, found = backend.forward_backward(pack), gradients(backend)
    [scores] = backend.score(pack, quantity="logprobs")
    plain = build_backend(directory)
    with forced(plain, pack.routes):
        expected = plain.forward_backward(pack)
        [expected_scores] = plain.score(pack, quantity="logprobs")
    np.testing.assert_allclose(scores, expected_scores, atol=1e-6)
    assert totals.sums["mismatch_kl"] == pytest.approx(expected.sums["mismatch_kl"], abs=1e-5)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)
    for place in range(LAYERS):
        assert float(found[f"model.layers.{place}.mlp.gate.weight"].abs().max()) > 1e-5
    # The router alone would choose others.
    plain.discard_gradients()
    [own] = plain.score(pack, quantity="logprobs")
    assert np.abs(own - scores).max() > 1e-3


def test_samples_of_a_pack_have_their_own_experts_and_so_have_its_parts(directory: Path) -> None:
    members = trajectories()
    backend = build_backend(directory, replays_routes=True)
    pack = packed(members)
    [together] = backend.score(pack, quantity="logprobs")
    for member, scores in pack.by_member(together):
        [alone] = backend.score(packed([members[member]]), quantity="logprobs")
        np.testing.assert_allclose(scores, alone, atol=1e-5)
    parts = [backend.score(part, quantity="logprobs")[0] for part in divide(pack, 2)]
    np.testing.assert_allclose(np.concatenate(parts), together, atol=1e-5)
    sent = decoded(encoded(pack))
    assert sent is not None
    assert sent.routes is not None
    assert pack.routes is not None
    assert np.array_equal(sent.routes, pack.routes)


def without_routes(pack: Pack) -> Pack:
    return replace(pack, routes=None)


@pytest.mark.parametrize("lora", [None, LoraSection(rank=2, target_modules=("q_proj", "v_proj"))])
def test_a_reference_takes_its_own_experts(directory: Path, lora: LoraSection | None) -> None:
    pack = packed(trajectories())
    backend = build_backend(directory, replays_routes=True, keep_reference=True, lora=lora)
    [reference] = backend.score(pack, quantity="reference_logprobs")
    [own] = build_backend(directory).score(without_routes(pack), quantity="logprobs")
    np.testing.assert_allclose(reference, own, atol=1e-6)
    # Nothing is trained yet, so the policy differs by its experts alone.
    [policy] = backend.score(pack, quantity="logprobs")
    assert np.abs(policy - reference).max() > 1e-3


def test_experts_beyond_a_byte_are_taken_by_their_ids(tmp_path: Path) -> None:
    [member, *_] = trajectories()
    assert member.routes is not None
    path = save_tiny("qwen3_moe", tmp_path, num_experts=300)
    backend = build_backend(path, replays_routes=True)
    small, large = member.routes.astype(np.uint16), member.routes.astype(np.uint16) + 256
    found = [backend.score(packed([replace(member, routes=each)]), quantity="logprobs")[0] for each in (small, large)]
    plain = build_backend(path)
    with forced(plain, large):
        [expected] = plain.score(packed([member]), quantity="logprobs")
    np.testing.assert_allclose(found[1], expected, atol=1e-6)
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.parametrize("routes", [b"", bytes(4 * 5), bytes([9] * 4 * 6)])
def test_a_group_with_routes_of_another_form_cannot_be_read(routes: bytes) -> None:
    shape = RoutingShape(num_layers=LAYERS, num_experts=EXPERTS, experts_per_token=CHOSEN)
    sample = Sample(token_ids=[5, 6, 7, 8], logprobs=[-1.0] * 4, policy_version=0, reward=1.0, routes=routes)
    group = make_group(make_prompt([1, 2, 3]), [sample])
    with pytest.raises(InvalidFieldError, match=r"trajectory\.routes: routes: "):
        training_samples(group, routing=shape)
    group.trajectories[0].routes = bytes(4 * 6)
    [read] = training_samples(group, routing=shape)
    assert read.routes is not None
    assert read.routes.shape == (6, LAYERS, CHOSEN)
    # Not asked for, they are not looked at.
    assert training_samples(group)[0].routes is None


def test_a_critic_takes_its_own_experts(directory: Path) -> None:
    pack = packed(trajectories())
    backend = build_backend(directory, replays_routes=True, critic_learning_rate=1e-3)
    # Its head of zeros learns first, so that its values say something.
    pack = replace(pack, values=np.zeros(pack.num_loss_tokens, np.float32), returns=np.ones_like(pack.advantages))
    backend.forward_backward(pack)
    backend.optimizer_step(divisor=1)
    [values] = backend.score(pack, quantity="values")
    [own] = backend.score(without_routes(pack), quantity="values")
    assert np.abs(values).max() > 1e-3
    np.testing.assert_array_equal(values, own)


def test_samples_without_routes_and_models_without_routers_are_refused_by_name(directory: Path, tmp_path: Path) -> None:
    backend = build_backend(directory, replays_routes=True)
    with pytest.raises(ValueError, match=r"routing_replay: the samples of a pack come without routes"):
        backend.score(without_routes(packed(trajectories())), quantity="logprobs")
    with pytest.raises(UnsupportedModelError, match=r"algorithm.routing_replay: .* of type 'qwen2' has no routers"):
        build_backend(save_tiny_qwen2(tmp_path), replays_routes=True)
    # A process without samples of its own still takes part.
    assert backend.forward_backward(None).num_tokens == 0


@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 2}, {"pipeline": 2}],
)
def test_meshes_that_cannot_replay_are_refused_by_name(parallel: dict[str, Any]) -> None:
    document = {"model": {"path": "none"}, "data": {"train": None}, "algorithm": {"routing_replay": True}}
    trainer = {"processes": 2, "parallel": parallel}
    with pytest.raises(ValidationError, match=r"routing_replay: true is not supported with trainer.parallel"):
        TrainingConfig.model_validate(document | {"trainer": trainer})
    assert TrainingConfig.model_validate(document | {"trainer": {"processes": 2}}).algorithm.routing_replay
