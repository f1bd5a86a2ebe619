"""Measures the time of decode steps by the number of sequences, with the real engine on one device: a child process.

A step's time is the difference between decoding many and few tokens of as many sequences, over the difference in
tokens: prefill, and whatever else happens once a sample, cancels out.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from contextlib import aclosing
from math import prod
from pathlib import Path

from console.probe.worker import Worker
from penstock.model.digests import safetensors_shapes
from penstock.model.model_folder import model_size
from services.generator.engine.engine import Engine, GenerateRequest, SamplingSettings
from services.generator.engines.base_config import ServedModel
from services.generator.engines.registry import ENGINES

BATCHES = (1, 4, 16, 64, 256)
PROMPT_TOKENS, FEW_TOKENS, MANY_TOKENS = 16, 8, 72
_CONTEXT_TOKENS = 128
_MADE_MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Measure as the settings say."""
    worker = Worker()
    given = worker.settings["model"]
    path = Path(given) if given else make_model(Path(worker.settings["folder"]) / "model")
    shapes = [shape for file in path.glob("*.safetensors") for shape in safetensors_shapes(file).values()]
    worker.tell(
        model=path.name if given else "made by the probe",
        params=float(sum(map(prod, shapes))),
        layers=model_size(path, "num_hidden_layers") or 1,
        file_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
    )
    asyncio.run(_measure(worker, path))


def make_model(folder: Path) -> Path:
    """Make a small model with random weights, 16 bits a parameter; returns its folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    Qwen2ForCausalLM(Qwen2Config(**_MADE_MODEL)).to(torch.bfloat16).save_pretrained(folder)
    return folder


async def _measure(worker: Worker, path: Path) -> None:
    settings = worker.settings
    config = ENGINES[settings["engine"]].model_validate(
        {
            "engine": settings["engine"],
            "max_concurrent_samples": max(BATCHES),
            "max_context_tokens": _CONTEXT_TOKENS,
            "num_threads": settings["num_threads"],
        }
    )
    engine = config.build(ServedModel(model_path=path))
    await engine.start()
    try:
        await _decode(engine, batch=1, num_tokens=FEW_TOKENS)
        end_s = time.monotonic() + settings["seconds"]
        points: list[dict[str, float]] = []
        for batch in BATCHES:
            few_s = await _decode(engine, batch=batch, num_tokens=FEW_TOKENS)
            many_s = await _decode(engine, batch=batch, num_tokens=MANY_TOKENS)
            # Noise on a busy machine can make the longer one the shorter.
            if many_s > few_s:
                points.append({"batch": batch, "step_s": (many_s - few_s) / (MANY_TOKENS - FEW_TOKENS)})
                worker.tell(points=points)
            if time.monotonic() + 4 * (few_s + many_s) > end_s:
                break
    finally:
        await engine.stop()


_numbers = itertools.count()


async def _decode(engine: Engine, *, batch: int, num_tokens: int) -> float:
    """Seconds to decode this many tokens of this many sequences, from the first request to the last token."""
    begin_s = time.perf_counter()
    await asyncio.gather(*(_sample(engine, next(_numbers), num_tokens) for _ in range(batch)))
    return time.perf_counter() - begin_s


async def _sample(engine: Engine, number: int, num_tokens: int) -> None:
    # Prompts differ, so that no cache of prefixes helps.
    prompt = random.Random(number).choices(range(3, 64), k=PROMPT_TOKENS)
    request = GenerateRequest(
        request_id=f"probe-{number}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingSettings(max_new_tokens=num_tokens),
    )
    async with aclosing(engine.generate(request)) as spans:
        async for _ in spans:
            pass


if __name__ == "__main__":
    main()
