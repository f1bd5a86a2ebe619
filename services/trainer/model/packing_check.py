"""Checks, on the loaded weights, that packed rows train a model on its own function.

Three questions, whose answers do not depend on how well the model is trained:

- Are its log-probs those of its own attention (`eager`, one sample, its own mask)? Windows and chunks are shortened for
  the comparison, so that a short sample exceeds them.
- Does a sample in a row depend on its neighbours? If not, the gradient of its log-probs in their embeddings is exactly
  zero, in any precision; a recurrence or a convolution along the row makes it non-zero.
- Do its rotary embeddings depend on the longest sample of a row? The configuration answers that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.trainer.batches.packing import Pack, Trajectory, join
from services.trainer.model.attention import PACKED_ATTENTION, PackedAttentionError, packed_inputs
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.precision import computing_in
from services.trainer.model.ranks import Ranks

SAMPLE_TOKENS = 32
SHORT_WINDOW = 8
MAX_DIFFERENCE = {torch.float32: 1e-3}
"""Mean over a sample's tokens, nats. The rounding of another kernel is a hundred times smaller."""
MAX_HALF_DIFFERENCE = 0.25
"""The same in 16 bits, whose rounding is that much coarser."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
_MOVING_ROTARY = frozenset(("dynamic", "longrope"))
_SEED = 7


def check_packing(model: PreTrainedModel, path: Path, ranks: Ranks, *, computing: torch.dtype) -> None:
    """Refuses a model if packed rows would train another function than its own; in all processes alike.

    Args:
        model: With `PACKED_ATTENTION`, in evaluation mode, on its device; it is left as it was.
        path: Its folder, for the message.
        ranks: The processes, each of which may hold a part of it.
        computing: Element type of matrix products.

    Raises:
        UnsupportedModelError: It is such a model; the message says why.
    """
    name = f"{path}: {model.config.model_type}"
    check_rotary(model, name)
    with _short_windows(model), computing_in(computing, model.device):
        for check in (_check_own_attention, _check_neighbours):
            problem = _problem(partial(check, dtype=computing), model, name)
            # Agreed on before the next passes, which need all processes.
            if not ranks.agree(problem is None):
                raise problem or UnsupportedModelError(f"{name}: another process refuses it")


def _problem(
    check: Callable[[PreTrainedModel, str], None], model: PreTrainedModel, name: str
) -> UnsupportedModelError | None:
    try:
        check(model, name)
    except UnsupportedModelError as error:
        return error
    except PackedAttentionError as error:
        return _refusal(f"{name} cannot be trained on packed rows: {error}", error)
    # A model with its own code for masks or attention fails in many ways on that of others.
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        return _refusal(
            f"{name} cannot be trained on packed rows: its attention is not transformers' common one "
            f"({type(error).__name__}: {error})",
            error,
        )
    return None


def _refusal(message: str, cause: Exception) -> UnsupportedModelError:
    refusal = UnsupportedModelError(message)
    refusal.__cause__ = cause
    return refusal


def check_rotary(model: PreTrainedModel, name: str) -> None:
    """Refuses, by UnsupportedModelError, rotary embeddings that depend on the longest sample of a row."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    for part in (parameters, *(value for value in parameters.values() if isinstance(value, Mapping))):
        kind, original = part.get("rope_type"), part.get("original_max_position_embeddings")
        if kind in _MOVING_ROTARY and not (original and config.max_position_embeddings <= original):
            raise UnsupportedModelError(
                f"{name} cannot be trained on packed rows: rope_type {kind!r} turns short samples by the longest of "
                "their row; set max_position_embeddings in its config.json to the context it was trained with first"
                + (f" ({original})" if original else "")
            )


def _check_own_attention(model: PreTrainedModel, name: str, *, dtype: torch.dtype) -> None:
    (sample,) = _samples(model, 1)
    pack = join([sample], [0])
    with torch.no_grad():
        found = _logprobs(model, packed_inputs(pack, model.device), pack)
        with _own_attention(model):
            inputs = packed_inputs(pack, model.device)
            del inputs["segment_lengths"]
            expected = _logprobs(model, inputs, pack)
    _require_close(found, expected, dtype=dtype, message=f"{name}: packed attention is not its own: log-probs differ")


def _check_neighbours(model: PreTrainedModel, name: str, *, dtype: torch.dtype) -> None:
    samples = _samples(model, 3)
    alone, row = join(samples, [1]), join(samples, [0, 1, 2])
    of_middle = torch.from_numpy(row.target_segments == 1).to(model.device)
    with torch.no_grad():
        expected = _logprobs(model, packed_inputs(alone, model.device), alone)
    with torch.enable_grad(), _embeddings(model) as embeddings:
        found = _logprobs(model, packed_inputs(row, model.device), row)[of_middle]
        (gradient_1th,) = torch.autograd.grad(found.sum(), embeddings)
    before, _, after = gradient_1th[0].split(list(row.segment_lengths))
    if before.count_nonzero() or after.count_nonzero():
        raise UnsupportedModelError(
            f"{name} cannot be trained on packed rows: samples in one row read each other, as they do through "
            "recurrent layers (Mamba, linear attention) and convolutions"
        )
    _require_close(
        found.detach(),
        expected,
        dtype=dtype,
        message=f"{name}: its place in a row changes a sample's log-probs",
    )


def _require_close(found: Tensor, expected: Tensor, *, dtype: torch.dtype, message: str) -> None:
    difference = float((found - expected).abs().mean())
    most = MAX_DIFFERENCE.get(dtype, MAX_HALF_DIFFERENCE)
    # Written so that a NaN is refused.
    if not difference <= most:
        raise UnsupportedModelError(f"{message} by {difference:.3g} nats on average; at most {most} is rounding")


def _samples(model: PreTrainedModel, number: int) -> list[Trajectory]:
    config = model.config.get_text_config()
    length = min(SAMPLE_TOKENS, getattr(config, "max_position_embeddings", SAMPLE_TOKENS))
    rng = np.random.default_rng(_SEED)
    nothing = np.zeros(length, np.float32)
    return [
        Trajectory(
            token_ids=rng.integers(0, config.vocab_size, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            behavior_logprobs=nothing,
            advantages=nothing,
        )
        for _ in range(number)
    ]


def _logprobs(model: PreTrainedModel, inputs: dict[str, Any], pack: Pack) -> Tensor:
    """float32[N]."""
    logits_tv = model(**inputs).logits[0].float()
    positions = torch.from_numpy(pack.logit_positions).to(model.device)
    targets = torch.from_numpy(pack.target_ids).to(model.device)
    return logits_tv[positions].log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(PACKED_ATTENTION)


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Both kinds of attention build their masks from the configuration in each forward pass."""
    config = model.config.get_text_config()
    windows = {name: window for name in _WINDOWS if (window := getattr(config, name, None))}
    for name in windows:
        setattr(config, name, min(windows[name], SHORT_WINDOW))
    try:
        yield
    finally:
        for name, window in windows.items():
            setattr(config, name, window)


@contextmanager
def _embeddings(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """The embedded tokens of the forward pass within, [1, T, H], detached from the table: gradients end there."""
    found: list[Tensor] = []

    def cut(_module: object, _inputs: object, output: Tensor) -> Tensor:
        found.append(output.detach().requires_grad_())
        return found[-1]

    hook = model.get_input_embeddings().register_forward_hook(cut)
    try:
        yield found
    finally:
        hook.remove()
