"""Steps of a trainer's backend, and whether several processes take and keep them as one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.batches.packing import Pack, Trajectory
from services.trainer.batches.rank_partition import partition
from services.trainer.model.backend import Backend, LossTotals, NonFiniteLossError
from services.trainer.publishing.written_weights import WrittenWeights
from tests.helpers.models.model_families import FAMILIES
from tests.helpers.trainers.two_processes import scores, two_processes, weights
from tests.unit.trainer.builders import build_trajectory

STEADY_MOMENT = 1e-7
"""A tenth of a gradient of a hundred times AdamW's epsilon."""
_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def made(folder: Path, family: str, *, is_tied: bool, **changes: object) -> Path:
    """A model of four layers."""
    torch.manual_seed(3)
    settings = _COMMON | FAMILIES[family] | {"tie_word_embeddings": is_tied} | changes
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"stands": "in"}', encoding="utf-8")
    return folder


def random_trajectories(seed: int, count: int = 11) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    return [
        build_trajectory(rng, num_prompt=int(rng.integers(1, 8)), num_completion=int(rng.integers(1, 24)))
        for _ in range(count)
    ]


def train(backend: Backend, seed: int) -> dict[str, float]:
    """A step as the trainer takes it; returns what was reported."""
    rounds = partition(random_trajectories(seed), max_pack_tokens=48, shares=backend.shares)
    totals = [backend.forward_backward(*packs) for packs in rounds]
    for packs, found in zip(rounds, totals, strict=True):
        assert_logprobs_are_of_packs(packs, found)
    merged = totals[0]
    for other in totals[1:]:
        merged = merged.merged(other)
    metrics = backend.optimizer_step(divisor=merged.num_tokens)
    return {**merged.means(), "grad_norm": metrics.grad_norm}


def assert_logprobs_are_of_packs(packs: Sequence[Pack | None], found: LossTotals) -> None:
    """In their order: what the loss reports follows from them."""
    of_packs = [pack for pack in packs if pack is not None]
    assert [len(each) for each in found.logprobs] == [pack.num_loss_tokens for pack in of_packs]
    gaps = np.concatenate(found.logprobs) - np.concatenate([pack.behavior_logprobs for pack in of_packs])
    assert float(np.sum(np.exp(gaps) - gaps - 1)) == pytest.approx(found.sums["mismatch_kl"], rel=1e-3)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """To 1e-5."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def assert_bit_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def assert_trains_as_one(many: Backend, one: Backend) -> None:
    """Before a step, and after it."""
    assert_equal(weights(many), weights(one))
    found, expected = (scores(backend, random_trajectories(9), "logprobs") for backend in (many, one))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert train(many, 1) == pytest.approx(train(one, 1), rel=1e-5, abs=1e-5)
    assert_stepped_alike(many, one)


def assert_stepped_alike(many: Backend, one: Backend) -> None:
    """AdamW's first step is nearly the gradient's sign: where the gradient is rounding, so is the step."""
    found, expected = weights(many), weights(one)
    shares = []
    for name in expected:
        parameter = one._learner.parameters[one._trained.moments_name(name)]
        moment = one._learner.optimizer.state[parameter]["exp_avg"].abs()
        is_steady = (moment > STEADY_MOMENT) | (moment == 0.0)
        shares.append(is_steady.flatten())
        found[name] = torch.where(is_steady, found[name], expected[name])
    assert torch.cat(shares).float().mean() > 0.99
    assert_equal(found, expected)


def assert_each_resumes_the_other(many: Backend, one: Backend, folder: Path) -> tuple[WrittenWeights, dict[str, float]]:
    """Exactly: one process holds the same bits, and so do several that resume from its checkpoint.

    Returns what several published, and what they reported of the step after; their checkpoint is in `of_many`.
    """
    for name in ("of_many", "of_one"):
        (folder / name).mkdir()
    written = many.write_weights(folder / "published").result()
    many.save(folder / "of_many").result()
    AutoModelForCausalLM.from_pretrained(folder / "of_many")
    one.load(folder / "of_many")
    assert one.write_weights(folder / "by_one").result().tensors == written.tensors
    one.save(folder / "of_one").result()
    train(many, 2)
    many.load(folder / "of_one")
    assert many.write_weights(folder / "again").result().tensors == written.tensors
    after = train(many, 2)
    assert after == pytest.approx(train(one, 2), rel=1e-5, abs=1e-5)
    return written, after


def assert_continues_in_shards(
    model: Path, checkpoint: Path, *, held: Mapping[str, Tensor], after: Mapping[str, float], **changes: Any
) -> None:
    """Two shards that load a checkpoint hold what was saved, and report the same of the step after."""
    with two_processes(model, **changes) as shards:
        shards.load(checkpoint)
        assert_bit_equal(weights(shards), held)
        assert train(shards, 2) == pytest.approx(after, rel=1e-5, abs=1e-5)


def assert_goes_on_after_a_loss_that_is_not_finite(backend: Backend) -> None:
    before = weights(backend)
    poisoned = random_trajectories(1, count=2)
    poisoned[1].advantages[:] = np.nan
    (packs,) = partition(poisoned, max_pack_tokens=64, shares=backend.shares)
    with pytest.raises(NonFiniteLossError):
        backend.forward_backward(*packs)
    backend.discard_gradients()
    assert_equal(weights(backend), before)
    assert train(backend, 5)["grad_norm"] > 0
