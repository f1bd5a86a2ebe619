"""Measures how long decoding pauses while a real engine loads new weights.

The version is already in a file: fetching it is measured elsewhere and does not pause decoding. The engine runs in a
separate process: `python -m benchmarks.weights.swap MODEL_DIR ENGINE DTYPE MAX_CONTEXT NUM_UPDATES RESULT.json`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from benchmarks.group_end import run_group
from benchmarks.weights.contents import median_and_spread
from benchmarks.weights.swap_models import SwapModel
from penstock.model.digests import manifest_digest, safetensors_digests
from penstock.process.bound_child import end_group_with_parent
from penstock.process.tasks import end
from services.generator.engine.engine import Engine, GenerateRequest, SamplingSettings, WeightUpdate
from services.generator.engines.base_config import DtypeName, ServedModel
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.vllm.config import VllmEngineConfig

ENGINES = ("transformers", "vllm")
NUM_SAMPLES = 2
GPU_SHARE = 0.6
START_TIMEOUT_S = 120.0
UPDATE_TIMEOUT_S = 30.0


async def measure(
    folder: Path, *, engine: str, model: SwapModel, num_updates: int, timeout_s: float | None = None
) -> dict[str, Any]:
    """Pause of each update while samples are decoded, in milliseconds, with the size of the weights.

    Also the seconds until the engine was up (`load_s`), and of each whole update with its verification (`update_s`).
    """
    model_path, result_path = folder / "model", folder / "swap.json"
    await asyncio.to_thread(model.write, model_path)
    arguments = (str(model_path), engine, model.dtype, str(model.max_context), str(num_updates), str(result_path))
    await run_group(
        "benchmarks.weights.swap",
        *arguments,
        timeout_s=timeout_s or 2 * START_TIMEOUT_S + num_updates * UPDATE_TIMEOUT_S,
    )
    result: dict[str, Any] = json.loads(await asyncio.to_thread(result_path.read_text, encoding="utf-8"))
    return result


async def swap(
    model_path: Path, *, engine_name: str, dtype: DtypeName, max_context: int, num_updates: int
) -> dict[str, Any]:
    """The same in this process, with an existing model."""
    path = model_path / "model.safetensors"
    tensors = safetensors_digests(path)
    engine = _build_engine(engine_name, ServedModel(model_path=model_path, dtype=dtype))
    begun_s = time.perf_counter()
    await engine.start()
    load_s = time.perf_counter() - begun_s
    try:
        decoding = [
            asyncio.create_task(_decode(engine, f"sample-{number}", max_context - 8)) for number in range(NUM_SAMPLES)
        ]
        async with asyncio.timeout(START_TIMEOUT_S):
            while engine.stats().tokens_generated == 0:  # noqa: ASYNC110 -- a counter
                await asyncio.sleep(0.01)
        rows = []
        for version in range(1, num_updates + 1):
            begun_s = time.perf_counter()
            report = await engine.update_weights(
                WeightUpdate(policy_version=version, path=path, tensors=tensors, digest=manifest_digest(tensors))
            )
            update_s = time.perf_counter() - begun_s
            rows.append({"pause_ms": report.pause_s * 1000, "update_s": update_s})
        is_decoding = not any(task.done() for task in decoding)
        await end(*decoding)
    finally:
        await engine.stop()
    if not is_decoding:
        raise RuntimeError("the samples ended before the updates did: their pauses would not be those of decoding")
    size_bytes = path.stat().st_size
    return {"engine": engine_name, "size_bytes": size_bytes, "load_s": load_s, **median_and_spread(rows)}


def _build_engine(name: str, model: ServedModel) -> Engine:
    # Imported here: torch takes seconds, and the other benchmarks do not need it.
    if name == "vllm":
        from services.generator.engines.vllm.vllm_engine import VllmEngine

        return VllmEngine(
            VllmEngineConfig(kv_cache_gib=0.25, gpu_memory_utilization=GPU_SHARE), model, stream_interval=1
        )
    from services.generator.engines.transformers.transformers_engine import TransformersEngine

    return TransformersEngine(TransformersEngineConfig(), model, stream_interval=1)


async def _decode(engine: Engine, name: str, num_tokens: int) -> None:
    sampling = SamplingSettings(max_new_tokens=num_tokens, seed=0)
    request = GenerateRequest(request_id=name, prompt_token_ids=(3, 4, 5), sampling=sampling)
    async with aclosing(engine.generate(request)) as spans:
        async for _ in spans:
            pass


if __name__ == "__main__":
    end_group_with_parent(os.getppid(), grace_s=0)
    folder, name, kind, context, updates, result_file = sys.argv[1:]
    document = asyncio.run(
        swap(
            Path(folder),
            engine_name=name,
            dtype=cast(DtypeName, kind),
            max_context=int(context),
            num_updates=int(updates),
        )
    )
    Path(result_file).write_text(json.dumps(document), encoding="utf-8")
