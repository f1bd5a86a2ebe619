"""Trains on the task in this process: sessions as a generator plays them, and the trainer's own step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.turns.playing import PROMPT, SAMPLES_PER_STEP, Played, players
from benchmarks.turns.task import NUM_TURNS, NextLetter
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.config import TrainingConfig
from services.trainer.run.policy_loading import load_policy
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import step_settings


async def train(
    model: Path, task: type[NextLetter], *, seed: int, num_steps: int, group_size: int = 8, **algorithm: object
) -> tuple[list[float], int]:
    """The share of right turns in each step's samples, and how often the environment died.

    Args:
        model: Folder of `make_model`.
        task: The environment.
        seed: Of the letters and of sampling.
        num_steps: Steps of 64 samples.
        group_size: Sessions that are shown the same letters.
        algorithm: Settings of the section of that name.
    """
    torch.set_num_threads(1)
    config = _config(model, seed=seed, group_size=group_size, algorithm=algorithm)
    policy = load_policy(config)
    sampler = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    shares: list[float] = []
    async with players(task, group_size=group_size) as (sessions, environment):
        for version in range(num_steps):
            sampler.load_state_dict(policy.backend.state_tensors(), strict=False)
            played = await sessions.play(sampler, seed=seed, version=version)
            groups = [[_sample(each, index, version) for index, each in enumerate(siblings)] for siblings in played]
            shares.append(float(np.mean([sample.reward for group in groups for sample in group])) / NUM_TURNS)
            step = TrainingStep(policy.backend, step_settings(config, policy_version=version))
            step.add_groups(groups)
            step.finish()
    return shares, environment.num_deaths


def _config(model: Path, *, seed: int, group_size: int, algorithm: dict[str, object]) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "run": {"seed": seed},
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": None},
            "sampling": {"max_new_tokens": 2 * NUM_TURNS},
            "algorithm": {
                "group_size": group_size,
                "prompts_per_step": SAMPLES_PER_STEP // group_size,
                "max_staleness": 0,
                "name": "dr_grpo",
                **algorithm,
            },
            "optimizer": {"learning_rate": 2e-3},
            "trainer": {"device": "cpu", "num_threads": 1},
        }
    )


def _sample(played: Played, index: int, version: int) -> TrainingSample:
    score = played.dialogue.score()
    assert score is not None
    return TrainingSample(
        group_id=played.group_id,
        sample_index=index,
        prompt_token_ids=np.array([PROMPT], np.int32),
        completion_token_ids=np.array(played.tokens, np.int32),
        behavior_logprobs=np.array(played.logprobs, np.float32),
        policy_versions=np.full(len(played.tokens), version, np.int64),
        reward=score.value,
        loss_mask=np.array(played.mask, np.bool_),
        turn_values=np.frombuffer(score.turn_values, "<f4"),
    )
