"""A tiny chat model that says what it was shown: for runs whose samples must get past their first turn."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from quickstart.tiny_model import build_model, save_model
from tests.helpers.console import ROOT
from tests.helpers.generators.openai_endpoint import END, chat_tokenizer

MAX_CONTEXT_TOKENS = 2048
Messages = list[dict[str, str]]


def save_speaker(
    directory: Path,
    draw: Callable[[random.Random], Messages],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    num_steps: int,
    batch_size: int,
) -> Path:
    """A model trained on drawn conversations; each begins with messages of others, which are always the same."""
    tokenizer = chat_tokenizer()
    model = build_model(tokenizer, seed=0)
    model.config.max_position_embeddings = MAX_CONTEXT_TOKENS

    def parts(rng: random.Random) -> list[tuple[str, bool]]:
        messages = draw(rng)
        first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
        head = tokenizer.apply_chat_template(messages[:first], tools=tools, tokenize=False, add_generation_prompt=True)
        said = [(head, False), (messages[first]["content"] + END, True)]
        for message in messages[first + 1 :]:
            if message["role"] == "assistant":
                said += [("<|im_start|>assistant\n", False), (message["content"] + END, True)]
            else:
                said.append((f"\n<|im_start|>{message['role']}\n{message['content']}{END}\n", False))
        return said

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loss = _example().train(model, tokenizer, parts, seed=0, num_steps=num_steps, batch_size=batch_size)
    finally:
        torch.set_num_threads(threads)
    print(f"{directory}: loss {loss:.3f}")
    save_model(model, tokenizer, directory)
    return directory


def _example() -> ModuleType:
    """How the example of an agent makes its model."""
    path = ROOT / "examples" / "openai_agent" / "make_model.py"
    spec = importlib.util.spec_from_file_location("make_agent_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
