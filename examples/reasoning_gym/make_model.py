"""Makes a model of a million parameters that begins to solve a task of reasoning_gym.

    python make_model.py TASK DIRECTORY --config '{"max_word_len": 5}' --until 0.25

It learns from the task's own answers until it answers the wanted share of held-out rows when it samples; what is left
is for reinforcement learning. A minute or two on one CPU core.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.optim import AdamW

from penstock.reasoning_gym.rows import RowDrawer
from penstock.reasoning_gym.source import EVALUATION_SEED, ReasoningGymSource
from quickstart.muon import Float32Muon
from quickstart.sampling import sample_responses
from quickstart.tiny_model import build_model, build_tokenizer, save_model

BATCH_SIZE = 24
CHECK_EVERY_STEPS = 25
NUM_DECAY_STEPS, MAX_STEPS = 600, 1200
NUM_ROWS, NUM_HELD_OUT = 4096, 256
SAMPLED_ROWS = 2**24
"""Where the rows of the warm start begin, far from those of a run."""


def draw(task: ReasoningGymSource, first: int, num_rows: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """Questions and answers."""
    drawer = RowDrawer("task", task, default_seed=seed)
    try:
        return [(row.question, row.answer) for row in drawer.draw(range(first, first + num_rows))]
    finally:
        drawer.close()


def batch(tokenizer, rows: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets, int64[B, T]; targets of -100 are not learned."""
    encoded = [(tokenizer.encode(question), tokenizer.encode(answer)) for question, answer in rows]
    longest = max(len(question) + len(answer) for question, answer in encoded) + 1
    ids, targets = [], []
    for question, answer in encoded:
        learned = [*answer, tokenizer.eos_token_id]
        padding = longest - len(question) - len(learned)
        ids.append([*question, *learned] + [tokenizer.pad_token_id] * padding)
        targets.append([-100] * len(question) + learned + [-100] * padding)
    return torch.tensor(ids)[:, :-1], torch.tensor(targets)[:, 1:]


def accuracy(model, tokenizer, rows: list[tuple[str, str]], *, seed: int | None) -> float:
    """Share of rows answered word for word; greedily without a seed."""
    model.eval()
    texts = sample_responses(model, tokenizer, [question for question, _ in rows], seed=seed)
    model.train()
    return sum(text == answer for text, (_, answer) in zip(texts, rows, strict=True)) / len(rows)


def train(model, tokenizer, rows, held_out, *, seed: int, until: float) -> None:
    """Supervised steps until the share is reached, or there were too many."""
    rng = random.Random(seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [Float32Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95), AdamW(others, lr=2e-3)]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in range(1, MAX_STEPS + 1):
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * max(0.05, 1 - step / NUM_DECAY_STEPS)
        ids, targets = batch(tokenizer, rng.sample(rows, BATCH_SIZE))
        logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % CHECK_EVERY_STEPS == 0:
            sampled = accuracy(model, tokenizer, held_out, seed=seed + step)
            print(f"step {step}: loss {loss.item():.3f}, sampled accuracy {sampled:.3f}", flush=True)
            if sampled >= until:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--config", type=json.loads, default={}, help="of the task, JSON")
    parser.add_argument("--until", type=float, default=0.25, help="share of held-out rows answered when sampling")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started_s = time.monotonic()
    torch.set_num_threads(1)
    task = ReasoningGymSource(reasoning_gym=args.task, config=args.config)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=args.seed)
    rows = draw(task, SAMPLED_ROWS, NUM_ROWS)
    held_out = draw(task, SAMPLED_ROWS, NUM_HELD_OUT, seed=EVALUATION_SEED)
    train(model, tokenizer, rows, held_out, seed=args.seed, until=args.until)
    save_model(model, tokenizer, args.directory)
    greedy = accuracy(model, tokenizer, held_out, seed=None)
    print(f"{args.directory}: greedy accuracy {greedy:.3f}, {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
