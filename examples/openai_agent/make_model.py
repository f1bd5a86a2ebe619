"""Makes a model of a million parameters that calls a tool, badly: the one that the example agent trains.

    python make_model.py DIRECTORY

It learns from conversations in which a number is occasionally copied wrongly. A minute or two on one CPU core.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import AddedToken
from torch.nn import functional
from torch.optim import AdamW

from quickstart.muon import Float32Muon
from quickstart.tiny_model import build_model, build_tokenizer, save_model

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_NUMBER = 99
SLIP_PROBABILITY = 0.15
BATCH_SIZE = 24
NUM_STEPS = 150


def chat_tokenizer():
    """The quick start's byte tokenizer with the markers of turns and tool calls."""
    tokenizer = build_tokenizer()
    marks = [AddedToken(mark, special=True, normalized=False) for mark in (START, END)]
    tags = [AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
    tokenizer.add_tokens([*marks, *tags])
    tokenizer.eos_token = END
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def conversation(rng: random.Random) -> list[tuple[str, bool]]:
    """A whole conversation in parts; those marked true are the assistant's and are learned."""
    a, b = (rng.randint(1, MAX_NUMBER) for _ in range(2))
    said_a, said_b = (_slip(number, rng) for number in (a, b))
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {said_a}, "b": {said_b}}}}}</tool_call>{END}'
    total = said_a + said_b
    return [
        (f"{START}user\n{a}+{b}={END}\n{START}assistant\n", False),
        (call, True),
        (f"\n{START}tool\n{total}{END}\n{START}assistant\n", False),
        (f"{_slip(total, rng)}{END}", True),
    ]


def _slip(number: int, rng: random.Random) -> int:
    return rng.randint(1, MAX_NUMBER) if rng.random() < SLIP_PROBABILITY else number


def batch(tokenizer, conversations) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets, int64[B, T]; targets of -100 are not learned."""
    rows = []
    for parts in conversations:
        ids, targets = [], []
        for text, is_learned in parts:
            part = tokenizer.encode(text, add_special_tokens=False)
            ids += part
            targets += part if is_learned else [-100] * len(part)
        rows.append((ids, targets))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row, _ in rows])
    targets = torch.tensor([row + [-100] * (longest - len(row)) for _, row in rows])
    return ids[:, :-1], targets[:, 1:]


def train(model, tokenizer, draw=conversation, *, seed: int, num_steps: int, batch_size: int = BATCH_SIZE) -> float:
    """Supervised steps on conversations as they are drawn; returns the last loss."""
    rng = random.Random(seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [Float32Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95), AdamW(others, lr=2e-3)]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    loss = torch.tensor(0.0)
    for step in range(num_steps):
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * max(0.05, 1 - step / num_steps)
        ids, targets = batch(tokenizer, [draw(rng) for _ in range(batch_size)])
        logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step} of {num_steps}, loss {loss.item():.3f}", flush=True)
    return loss.item()


def make(directory: Path, *, seed: int = 0, num_steps: int = NUM_STEPS) -> None:
    """Train and save."""
    torch.set_num_threads(1)
    tokenizer = chat_tokenizer()
    model = build_model(tokenizer, seed=seed)
    loss = train(model, tokenizer, seed=seed, num_steps=num_steps)
    save_model(model, tokenizer, directory)
    print(f"{directory}: loss {loss:.3f}")


if __name__ == "__main__":
    started_s = time.monotonic()
    make(Path(sys.argv[1]))
    print(f"{time.monotonic() - started_s:.0f} s")
