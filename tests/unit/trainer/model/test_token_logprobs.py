"""Log-probs by slices of positions: values and gradients as from all logits, and no tensor larger than a slice's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.model.token_logprobs import TokenLogprobs

NUM_POSITIONS, HIDDEN, VOCAB = 11, 6, 40


class ToyModel(nn.Module):
    """A causal model without layers: embeddings, an output layer, and what `finish` does to its logits."""

    def __init__(self, *, finish=lambda logits: logits, bias=False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=bias)
        self.finish = finish

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, logits_to_keep: Any = slice(None)) -> SimpleNamespace:
        return SimpleNamespace(logits=self.finish(self.head(self.embedding(input_ids)[:, logits_to_keep])))


INPUTS = {"input_ids": torch.arange(NUM_POSITIONS + 3)[None] * 3 % VOCAB}
POSITIONS = torch.arange(NUM_POSITIONS) + 1
TARGETS = torch.arange(NUM_POSITIONS) * 7 % VOCAB
TEMPERATURES = torch.linspace(0.5, 2.0, NUM_POSITIONS)
WEIGHTS = torch.linspace(-1.0, 2.0, NUM_POSITIONS)
"""Gradients of the log-probs."""


def plain(model, temperatures=None) -> Tensor:
    logits = model(**INPUTS, logits_to_keep=POSITIONS).logits[0].float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return logits.log_softmax(-1).gather(1, TARGETS[:, None])[:, 0]


def sliced(model, temperatures=None, *, positions_a_slice=4) -> Tensor:
    logprobs = TokenLogprobs(model, inputs=INPUTS, logits_bytes=positions_a_slice * 4 * VOCAB)
    return logprobs.of(model, INPUTS, positions_n=POSITIONS, targets_n=TARGETS, temperatures_n=temperatures)


def gradients(model, logprobs: Tensor) -> dict[str, Tensor]:
    (logprobs * WEIGHTS).sum().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


FINISHES = {
    "as_they_are": lambda logits: logits,
    "divided": lambda logits: logits / 13.0,
    "multiplied": lambda logits: logits * 0.0625,
    "softcapped": lambda logits: torch.tanh(logits / 30.0) * 30.0,
    "shifted": lambda logits: logits + torch.arange(VOCAB) / 10.0,
}


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("temperatures", [None, TEMPERATURES], ids=["temperature_one", "temperatures"])
@pytest.mark.parametrize("positions_a_slice", [0, 1, 4, NUM_POSITIONS, 99])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_all_logits(finish, temperatures, positions_a_slice, bias):
    model, other = (ToyModel(finish=FINISHES[finish], bias=bias) for _ in range(2))
    found, expected = sliced(model, temperatures, positions_a_slice=positions_a_slice), plain(other, temperatures)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model, found), gradients(other, expected))


def test_a_tied_output_layer_gets_the_gradients_of_both_uses():
    model, other = ToyModel(), ToyModel()
    for each in (model, other):
        each.head.weight = each.embedding.weight
    torch.testing.assert_close(gradients(model, sliced(model)), gradients(other, plain(other)))


def test_a_frozen_output_layer_gets_no_gradient_and_passes_one_on():
    model, other = ToyModel(), ToyModel()
    for each in (model, other):
        each.head.requires_grad_(False)
    found = gradients(model, sliced(model))
    assert list(found) == ["embedding.weight"]
    torch.testing.assert_close(found, gradients(other, plain(other)))


@pytest.mark.parametrize("positions_a_slice", [4, 99])
def test_autocast_computes_in_16_bits_and_sums_in_32(positions_a_slice):
    model, other = ToyModel(), ToyModel()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = sliced(model, positions_a_slice=positions_a_slice), plain(other)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected)
    found_gradients, expected_gradients = gradients(model, found), gradients(other, expected)
    torch.testing.assert_close(found_gradients, expected_gradients, atol=0.02, rtol=0.02)


def test_without_gradients_nothing_is_kept():
    model = ToyModel()
    with torch.no_grad():
        found = sliced(model, positions_a_slice=99)
    assert not found.requires_grad
    torch.testing.assert_close(found, plain(model).detach())


def test_logits_that_are_not_finite_stay_so():
    model = ToyModel()
    logprobs = TokenLogprobs(model, inputs=INPUTS, logits_bytes=4 * 4 * VOCAB)
    with torch.no_grad():
        model.head.weight[3] = torch.inf
    found = logprobs.of(model, INPUTS, positions_n=POSITIONS, targets_n=TARGETS)
    assert not found.isfinite().any()


def test_a_softcap_is_found_however_small_the_logits_are():
    model = ToyModel(finish=FINISHES["softcapped"])
    logprobs = TokenLogprobs(model, inputs=INPUTS)
    with torch.no_grad():
        model.head.weight *= 1_000.0
    found = logprobs.of(model, INPUTS, positions_n=POSITIONS, targets_n=TARGETS)
    torch.testing.assert_close(found, plain(model))


def test_outside_of_it_the_model_returns_logits_as_ever():
    model = ToyModel()
    before = model(**INPUTS).logits
    sliced(model)
    torch.testing.assert_close(model(**INPUTS).logits, before)


class LargestResult(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_no_tensor_is_larger_than_the_logits_of_a_slice():
    model = ToyModel()
    logprobs = TokenLogprobs(model, inputs=INPUTS, logits_bytes=4 * 4 * VOCAB)
    largest_weight = VOCAB * HIDDEN
    assert largest_weight > 4 * VOCAB
    with LargestResult() as largest:
        gradients(model, logprobs.of(model, INPUTS, positions_n=POSITIONS, targets_n=TARGETS))
    assert 0 < largest.num_elements == largest_weight < NUM_POSITIONS * VOCAB
