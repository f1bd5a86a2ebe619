"""Compares the trainer's step with the bare loop over the same samples: `penstock bench trainer.throughput MODEL_DIR`.

Both train alternately in this process on one thread, on synthetic samples like the quick start's. The trainer gets them
two groups at a time and does all its work (checks, advantages, packing, correction, report); the bare loop gets
prepared packs. CPU seconds count, so that other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.trainer.bare import BareLoop
from benchmarks.trainer.batches import packed_batch
from benchmarks.trainer.recorded import Groups
from services.trainer.algorithms.base import Normalization
from services.trainer.algorithms.dr_grpo import DR_GRPO
from services.trainer.algorithms.loss import LossSettings, policy_loss
from services.trainer.algorithms.terms.correction import Correction
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.model.model_loading import ModelSettings
from services.trainer.run_sections import OptimizerConfig
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_report import StepReport
from services.trainer.step.step_settings import StepSettings

GROUP_SIZE, NUM_GROUPS, GROUPS_AT_ONCE = 8, 32, 2
PROMPT_TOKENS, MEAN_TOKENS, LENGTH_SIGMA, MAX_TOKENS = 18, 45.0, 0.6, 195
PACK_TOKENS = 1024
LEARNING_RATE = 1e-6


def made_groups(vocab_size: int, seed: int) -> Groups:
    """One step's samples: lengths as in the quick start, tokens and rewards drawn."""
    rng = np.random.default_rng(seed)
    location = np.log(MEAN_TOKENS) - LENGTH_SIGMA**2 / 2
    return [
        [_sample(rng, vocab_size, group, index, location) for index in range(GROUP_SIZE)] for group in range(NUM_GROUPS)
    ]


def _sample(rng: np.random.Generator, vocab_size: int, group: int, index: int, location: float) -> TrainingSample:
    num_tokens = int(np.clip(rng.lognormal(location, LENGTH_SIGMA), 4, MAX_TOKENS))
    return TrainingSample(
        group_id=f"g{group}",
        sample_index=index,
        prompt_token_ids=rng.integers(0, vocab_size, PROMPT_TOKENS).astype(np.int32),
        completion_token_ids=rng.integers(0, vocab_size, num_tokens).astype(np.int32),
        behavior_logprobs=-rng.random(num_tokens).astype(np.float32),
        policy_versions=np.zeros(num_tokens, dtype=np.int64),
        reward=float(rng.random() < 0.5),
    )


def trainer_step(backend: RankBackend, groups: Groups) -> StepReport:
    """One step as the service runs it."""
    step = TrainingStep(
        backend,
        StepSettings(
            policy_version=0,
            max_staleness=0,
            max_pack_tokens=PACK_TOKENS,
            algorithm=DR_GRPO,
            normalization=Normalization.TOKENS,
        ),
    )
    for first in range(0, len(groups), GROUPS_AT_ONCE):
        step.add_groups(groups[first : first + GROUPS_AT_ONCE])
    return step.finish()


def compare(model_dir: Path, *, num_repetitions: int, progress: Callable[[str], None]) -> dict[str, object]:
    """Medians over repetitions, their ratio, and how full the trainer's packs were."""
    torch.set_num_threads(1)
    loss = LossSettings(clip=DR_GRPO.clip, normalization=Normalization.TOKENS, correction=Correction.TRUNCATED)
    backend = RankBackend(
        model=ModelSettings(path=model_dir, dtype="float32", device="cpu"),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
        loss=partial(policy_loss, algorithm=DR_GRPO, settings=loss),
        seed=0,
    )
    bare = BareLoop(model_dir, learning_rate=LEARNING_RATE, max_grad_norm=1.0)
    ours_s: list[float] = []
    bare_s: list[float] = []
    fills: list[float] = []
    # One more than is counted: the first one includes first touches of memory.
    for repetition in range(num_repetitions + 1):
        progress(f"repetition {repetition} of {num_repetitions}")
        groups = made_groups(backend.vocab_size, seed=repetition)
        batch = packed_batch(groups, max_pack_tokens=PACK_TOKENS)
        bare_s.append(_cpu_s(partial(bare.step, batch.packs, num_tokens=batch.num_loss_tokens)))
        reports: list[StepReport] = []
        ours_s.append(_cpu_s(lambda: reports.append(trainer_step(backend, groups))))  # noqa: B023 - called at once
        fills.append(reports[0].pack_fill or 0.0)
    ratios = [theirs / ours for theirs, ours in zip(bare_s[1:], ours_s[1:], strict=True)]
    return {
        "throughput_ratio_to_bare": statistics.median(ratios),
        "trainer_cpu_s_per_step": statistics.median(ours_s[1:]),
        "bare_cpu_s_per_step": statistics.median(bare_s[1:]),
        "pack_fill": statistics.median(fills[1:]),
        "num_repetitions": num_repetitions,
        "spread": {"throughput_ratio_to_bare": [min(ratios), max(ratios)]},
    }


def _cpu_s(work: Callable[[], object]) -> float:
    before_s = time.process_time()
    work()
    return time.process_time() - before_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description="The trainer's step compared with a bare PyTorch loop.")
    parser.add_argument("model_dir", type=Path, help="Hugging Face directory, for example the quick start's")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args(arguments)
    result = compare(
        options.model_dir, num_repetitions=options.repetitions, progress=lambda text: print(text, file=sys.stderr)
    )
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
