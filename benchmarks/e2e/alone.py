"""Runs either side alone on one core: `python -m benchmarks.e2e.alone generation|training JSON OUT.json`.

Both repeat the work of a run of Penstock: the samples that it trained on, from its recording. Generation is vLLM's own
offline engine over the same prompts, with each sample's original length; training is the bare PyTorch loop over the
same batches, packed before the clock starts. Reward, broker and weight transfer cost nothing here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trainer.recorded import Groups, read_steps

MAX_CONCURRENT = 256
"""The quick start's `generator.max_concurrent_samples`."""
KV_CACHE_GIB = 0.25
MAX_STEPS = 8
"""Steps of either side; each has 256 samples and takes some two seconds."""
PACK_TOKENS = 1024
"""The default `trainer.tokens_per_pack`."""


def generation(model_dir: Path, steps: Sequence[Groups]) -> dict[str, float]:
    """Samples and tokens per second."""
    from services.generator.engines.vllm.process_setup import cpu_environment, quiet_environment

    os.environ.update({**quiet_environment(), **cpu_environment(num_threads=1), "VLLM_LOGGING_LEVEL": "ERROR"})
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model_dir),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=MAX_CONCURRENT,
        kv_cache_memory_bytes=int(KV_CACHE_GIB * 2**30),
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
    )
    samples = [sample for groups in steps for group in groups for sample in group]
    # Longest first keeps the engine full to the end, as in a run, where more prompts always wait.
    samples.sort(key=lambda sample: -sample.completion_token_ids.size)
    prompts = [{"prompt_token_ids": sample.prompt_token_ids.tolist()} for sample in samples]
    settings = [
        SamplingParams(max_tokens=sample.completion_token_ids.size, ignore_eos=True, detokenize=False, logprobs=0)
        for sample in samples
    ]
    warm = MAX_CONCURRENT // 4
    llm.generate(prompts[-warm:], settings[-warm:], use_tqdm=False)
    begin_s = time.monotonic()
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    wall_s = time.monotonic() - begin_s
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"samples_per_second": len(samples) / wall_s, "tokens_per_second": num_tokens / wall_s}


def training(model_dir: Path, steps: Sequence[Groups]) -> dict[str, float]:
    """Samples and completion tokens per second."""
    import torch

    from benchmarks.trainer.bare import BareLoop
    from benchmarks.trainer.batches import packed_batch

    torch.set_num_threads(1)
    batches = [packed_batch(groups, max_pack_tokens=PACK_TOKENS) for groups in steps]
    # A negligible learning rate keeps the weights near those that sampled, and so the magnitudes.
    loop = BareLoop(model_dir, learning_rate=1e-9, max_grad_norm=1.0)
    loop.step(batches[0].packs, num_tokens=batches[0].num_loss_tokens)
    begin_s = time.monotonic()
    for batch in batches:
        loop.step(batch.packs, num_tokens=batch.num_loss_tokens)
    wall_s = time.monotonic() - begin_s
    return {
        "samples_per_second": sum(batch.num_samples for batch in batches) / wall_s,
        "tokens_per_second": sum(batch.num_loss_tokens for batch in batches) / wall_s,
    }


def spread_steps(steps: Sequence[Groups]) -> Sequence[Groups]:
    """MAX_STEPS of them, evenly spread over the run, whose samples grow longer as it proceeds.

    Excludes the first, as the curves do: it consists of the earliest samples, which are short.
    """
    rest = steps[1:] or steps
    stride = -(-len(rest) // MAX_STEPS)
    return rest[::stride]


def main() -> None:
    """Run the side given by the arguments, on one core."""
    side, document, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sides: dict[str, Any] = {"generation": generation, "training": training}
    steps = read_steps(Path(document["recording"]))
    found = sides[side](Path(document["model_dir"]), spread_steps(steps))
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
