"""Measures how long decoding pauses while a real engine loads new weights, on the CPU in float32.

The version is already in a file: fetching it is measured elsewhere and does not pause decoding. The engine runs in a
separate process: `python -m benchmarks.weights.swap MODEL_DIR ENGINE NUM_UPDATES RESULT.json`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks.group_end import run_group
from benchmarks.weights.contents import median_and_spread
from penstock.model.digests import manifest_digest, safetensors_digests
from penstock.process.bound_child import end_group_with_parent
from penstock.process.tasks import end
from services.generator.engine.engine import Engine, GenerateRequest, SamplingSettings, WeightUpdate
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.vllm.config import VllmEngineConfig

ENGINES = ("transformers", "vllm")
NUM_SAMPLES = 2
VOCAB_SIZE, MAX_CONTEXT = 256, 4096
START_TIMEOUT_S = 120.0
UPDATE_TIMEOUT_S = 30.0


async def measure(folder: Path, *, engine: str, hidden_size: int, num_layers: int, num_updates: int) -> dict[str, Any]:
    """Pause of each update while samples are decoded, in milliseconds, with the size of the weights."""
    model_path, result_path = folder / "model", folder / "swap.json"
    await asyncio.to_thread(_make_model, model_path, hidden_size, num_layers)
    await run_group(
        *("benchmarks.weights.swap", str(model_path), engine, str(num_updates), str(result_path)),
        timeout_s=2 * START_TIMEOUT_S + num_updates * UPDATE_TIMEOUT_S,
    )
    result: dict[str, Any] = json.loads(await asyncio.to_thread(result_path.read_text, encoding="utf-8"))
    return result


async def swap(model_path: Path, *, engine_name: str, num_updates: int) -> dict[str, Any]:
    """The same in this process, with an existing model."""
    path = model_path / "model.safetensors"
    tensors = safetensors_digests(path)
    engine = _build_engine(engine_name, model_path)
    await engine.start()
    try:
        decoding = [asyncio.create_task(_decode(engine, f"sample-{number}")) for number in range(NUM_SAMPLES)]
        async with asyncio.timeout(START_TIMEOUT_S):
            while engine.stats().tokens_generated == 0:  # noqa: ASYNC110 -- a counter
                await asyncio.sleep(0.01)
        rows = []
        for version in range(1, num_updates + 1):
            report = await engine.update_weights(
                WeightUpdate(policy_version=version, path=path, tensors=tensors, digest=manifest_digest(tensors))
            )
            rows.append({"pause_ms": report.pause_s * 1000})
        is_decoding = not any(task.done() for task in decoding)
        await end(*decoding)
    finally:
        await engine.stop()
    if not is_decoding:
        raise RuntimeError("the samples ended before the updates did: their pauses would not be those of decoding")
    return {"engine": engine_name, "size_bytes": path.stat().st_size, **median_and_spread(rows)}


def _build_engine(name: str, model_path: Path) -> Engine:
    model = ServedModel(model_path=model_path, dtype="float32")
    # Imported here: torch takes seconds, and the other benchmarks do not need it.
    if name == "vllm":
        from services.generator.engines.vllm.vllm_engine import VllmEngine

        return VllmEngine(VllmEngineConfig(kv_cache_gib=0.25), model, stream_interval=1)
    from services.generator.engines.transformers.transformers_engine import TransformersEngine

    return TransformersEngine(TransformersEngineConfig(), model, stream_interval=1)


async def _decode(engine: Engine, name: str) -> None:
    sampling = SamplingSettings(max_new_tokens=MAX_CONTEXT - 8, seed=0)
    request = GenerateRequest(request_id=name, prompt_token_ids=(3, 4, 5), sampling=sampling)
    async with aclosing(engine.generate(request)) as spans:
        async for _ in spans:
            pass


def _make_model(folder: Path, hidden_size: int, num_layers: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=MAX_CONTEXT,
        eos_token_id=None,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    end_group_with_parent(os.getppid(), grace_s=0)
    document = asyncio.run(swap(Path(sys.argv[1]), engine_name=sys.argv[2], num_updates=int(sys.argv[3])))
    Path(sys.argv[4]).write_text(json.dumps(document), encoding="utf-8")
