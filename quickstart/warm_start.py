"""Runs the supervised warm start: a minute of imitation that leaves the model right about one time in three.

The worked examples contain deliberate slips. A model that imitates them well is accurate in greedy decoding and
unreliable when it samples: reinforcement learning then closes that gap.

Invariants:
- Training stops by measured accuracy on held-out problems, never by the clock, so a slow machine gives the same model.
- Even a perfect imitation of the examples samples below `AccuracyBand.max_sampled`: slips alone cost that much.
- The seed decides the examples, their order and the draws of the measurements.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from quickstart.arithmetic import MAX_TERMS, Problem, sample_problem, write_working
from quickstart.muon import Float32Muon
from quickstart.sampling import measure_accuracy

# Axes: B examples, T padded length.
_IGNORED_TARGET = -100
_NUM_POOLED_EXAMPLES = 256
_NUM_WARM_UP_STEPS = 20
_LAST_RATE_FRACTION = 0.05
_FIRST_MAX_TERMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyBand:
    """Limits between which the warm start may end, as shares of problems solved."""

    min_sampled: float = 0.22
    max_sampled: float = 0.40
    min_greedy: float = 0.78
    """A high greedy accuracy is the headroom that reinforcement learning needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """Settings that decide the outcome of a warm start, besides the seed."""

    slip_probability: float = 0.28
    """Chance that a worked example omits a term."""
    matrix_learning_rate: float = 0.02
    """Muon's learning rate, for the weight matrices of the layers."""
    other_learning_rate: float = 2e-3
    """AdamW's learning rate, for the embedding, the head, norms and biases."""
    max_batch_tokens: int = 1024
    """Padded tokens per step."""
    num_curriculum_steps: int = 150
    """Steps over which the longest sum grows to its full length."""
    num_decay_steps: int = 660
    """Steps over which the learning rates decay; they stay at their lowest afterwards."""
    max_steps: int = 1000
    check_every_steps: int = 30
    """Steps between measurements, the first of which falls on `num_decay_steps`."""
    band: AccuracyBand = AccuracyBand()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartResult:
    """Result of a warm start."""

    num_steps: int
    sampled_accuracy: float
    greedy_accuracy: float
    is_in_band: bool
    """False if `max_steps` ran out first."""


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    held_out: Sequence[Problem],
    *,
    seed: int,
    settings: WarmStartSettings,
    on_progress: Callable[[str], None],
) -> WarmStartResult:
    """Train `model` in place on worked examples until it is in the accuracy band.

    Args:
        model: Untrained model.
        tokenizer: The model's tokenizer.
        held_out: Problems to measure on; none is trained on.
        seed: Decides the examples and the measurements' draws.
        settings: Schedule and band.
        on_progress: Called with one line of text at each measurement and occasionally in between.
    """
    batches = _stream_batches(tokenizer, random.Random(seed), settings)
    optimizers = _build_optimizers(model, settings)
    schedules = [
        LambdaLR(optimizer, lambda num_done: _rate_fraction(num_done + 1, settings.num_decay_steps))
        for optimizer in optimizers
    ]
    result = WarmStartResult(num_steps=0, sampled_accuracy=0.0, greedy_accuracy=0.0, is_in_band=False)
    for step in range(1, settings.max_steps + 1):
        loss = _train_step(model, optimizers, *next(batches))
        for schedule in schedules:
            schedule.step()
        if step % settings.check_every_steps:
            continue
        if step < settings.num_decay_steps and step != settings.max_steps:
            on_progress(f"warm start: step {step} of about {settings.num_decay_steps}, loss {loss:.3f}")
            continue
        result = _measure(model, tokenizer, held_out, seed=seed, num_steps=step, band=settings.band)
        on_progress(
            f"warm start: step {step}, loss {loss:.3f}, held-out accuracy {result.sampled_accuracy:.3f} sampled, "
            f"{result.greedy_accuracy:.3f} greedy"
        )
        if result.is_in_band:
            break
    return result


def _measure(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    held_out: Sequence[Problem],
    *,
    seed: int,
    num_steps: int,
    band: AccuracyBand,
) -> WarmStartResult:
    model.eval()
    sampled = measure_accuracy(model, tokenizer, held_out, seed=seed)
    greedy = measure_accuracy(model, tokenizer, held_out, seed=None)
    return WarmStartResult(
        num_steps=num_steps,
        sampled_accuracy=sampled,
        greedy_accuracy=greedy,
        is_in_band=band.min_sampled <= sampled <= band.max_sampled and greedy >= band.min_greedy,
    )


def _train_step(
    model: Qwen2ForCausalLM, optimizers: Sequence[Optimizer], ids_BT: torch.Tensor, targets_BT: torch.Tensor
) -> float:
    model.train()
    # Padding is on the right and attention is causal, so no mask is needed.
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=_IGNORED_TARGET)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def _build_optimizers(model: Qwen2ForCausalLM, settings: WarmStartSettings) -> list[Optimizer]:
    """Muon for the layers' matrices: it needs about half as many examples as AdamW alone."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Float32Muon(matrices, lr=settings.matrix_learning_rate, weight_decay=0.01, momentum=0.95),
        AdamW(others, lr=settings.other_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _rate_fraction(step: int, num_decay_steps: int) -> float:
    """Share of the learning rate at a step: linear warm-up times a cosine decay."""
    progress = min(1.0, step / num_decay_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return min(1.0, step / _NUM_WARM_UP_STEPS) * (_LAST_RATE_FRACTION + (1 - _LAST_RATE_FRACTION) * cosine)


def _max_terms(step: int, num_curriculum_steps: int) -> int:
    """Longest sum at a step; short sums come first, or the model is slow to find where to copy from."""
    progress = min(1.0, step / num_curriculum_steps)
    return int(_FIRST_MAX_TERMS + (MAX_TERMS - _FIRST_MAX_TERMS) * progress**1.5)


def _stream_batches(
    tokenizer: Qwen2Tokenizer, rng: random.Random, settings: WarmStartSettings
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches endlessly: inputs and next-token targets, int64 [B, T], of examples of similar lengths."""
    step = 0
    while True:
        max_terms = _max_terms(step, settings.num_curriculum_steps)
        examples = [_encode_example(tokenizer, rng, max_terms, settings) for _ in range(_NUM_POOLED_EXAMPLES)]
        examples.sort(key=lambda example: len(example[0]))
        batches = _split(examples, settings.max_batch_tokens)
        rng.shuffle(batches)
        for batch in batches:
            step += 1
            yield _pad(batch, tokenizer.pad_token_id)


def _encode_example(
    tokenizer: Qwen2Tokenizer, rng: random.Random, max_terms: int, settings: WarmStartSettings
) -> tuple[list[int], int]:
    """Return an example's token ids and the number of those in the prompt."""
    problem = sample_problem(rng, held_out=False, max_terms=max_terms)
    working = write_working(problem, rng=rng, slip_probability=settings.slip_probability)
    prompt_ids = tokenizer.encode(problem.prompt)
    return [*prompt_ids, *tokenizer.encode(working), tokenizer.eos_token_id], len(prompt_ids)


def _split(examples: Sequence[tuple[list[int], int]], max_batch_tokens: int) -> list[list[tuple[list[int], int]]]:
    """Cut examples, sorted by length, into batches of bounded padded size."""
    batches: list[list[tuple[list[int], int]]] = [[]]
    for example in examples:
        if batches[-1] and (len(batches[-1]) + 1) * len(example[0]) > max_batch_tokens:
            batches.append([])
        batches[-1].append(example)
    return batches


def _pad(batch: Sequence[tuple[list[int], int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    targets = [torch.tensor([_IGNORED_TARGET] * num_prompt + ids[num_prompt:]) for ids, num_prompt in batch]
    ids_BT = pad_sequence([torch.tensor(ids) for ids, _ in batch], batch_first=True, padding_value=pad_token_id)
    targets_BT = pad_sequence(targets, batch_first=True, padding_value=_IGNORED_TARGET)
    return ids_BT[:, :-1], targets_BT[:, 1:]
