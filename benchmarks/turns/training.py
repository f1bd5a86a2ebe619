"""Trains on the task in this process: its own sampling, the trainer's own step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.trainer.lagging import decode, make_row
from benchmarks.turns.task import NUM_TURNS, VOCABULARY, NextLetter
from penstock.environments import Action, Task
from services.generator.engine.engine import SamplingSettings
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.config import TrainingConfig
from services.trainer.run.policy_loading import load_policy
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import step_settings

GROUP_SIZE, PROMPTS_PER_STEP = 8, 8


@dataclass(slots=True)
class _Session:
    """One sample."""

    environment: NextLetter
    group: int
    prompt: int
    """The token of the first letter."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def give(self, token_id: int, logprob: float, *, is_sampled: bool) -> None:
        self.tokens.append(token_id)
        self.logprobs.append(logprob)
        self.mask.append(is_sampled)


def train(model: Path, *, seed: int, num_steps: int, **algorithm: object) -> list[float]:
    """The share of right turns in each step's samples.

    Args:
        model: Folder of `make_model`.
        seed: Of the letters and of sampling.
        num_steps: Steps of 8 x 8 samples.
        algorithm: Settings of the section of that name.
    """
    torch.set_num_threads(1)
    config = TrainingConfig.model_validate(
        {
            "run": {"seed": seed},
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": None},
            "sampling": {"max_new_tokens": 2 * NUM_TURNS},
            "algorithm": {
                "group_size": GROUP_SIZE,
                "prompts_per_step": PROMPTS_PER_STEP,
                "max_staleness": 0,
                "name": "dr_grpo",
                **algorithm,
            },
            "optimizer": {"learning_rate": 2e-3},
            "trainer": {"device": "cpu", "num_threads": 1},
        }
    )
    policy = load_policy(config)
    sampler = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    shares: list[float] = []
    for version in range(num_steps):
        sampler.load_state_dict(policy.backend.state_tensors(), strict=False)
        sessions = _play(sampler, seed=seed, version=version)
        groups = [[_sample(session, index, version) for index, session in enumerate(siblings)] for siblings in sessions]
        shares.append(float(np.mean([np.mean(session.rewards) for siblings in sessions for session in siblings])))
        step = TrainingStep(policy.backend, step_settings(config, policy_version=version))
        step.add_groups(groups)
        step.finish()
    return shares


def _play(model: torch.nn.Module, *, seed: int, version: int) -> list[list[_Session]]:
    first = (seed << 20) + version * PROMPTS_PER_STEP
    sessions = [[_begin(first + number) for _ in range(GROUP_SIZE)] for number in range(PROMPTS_PER_STEP)]
    every = [session for siblings in sessions for session in siblings]
    for turn in range(NUM_TURNS):
        rows = [
            make_row(
                (session.prompt, *session.tokens),
                SamplingSettings(max_new_tokens=1, seed=(first * len(every) + index) * NUM_TURNS + turn),
            )
            for index, session in enumerate(every)
        ]
        decode(model, rows)
        for session, row in zip(every, rows, strict=True):
            _take(session, turn, row.new_token_ids[0], row.new_logprobs[0])
    return sessions


def _begin(seed: int) -> _Session:
    environment = NextLetter()
    environment.reset(Task(seed=seed))
    return _Session(environment=environment, group=seed, prompt=VOCABULARY.index(environment.shown[0]))


def _take(session: _Session, turn: int, token_id: int, logprob: float) -> None:
    session.give(token_id, logprob, is_sampled=True)
    outcome = session.environment.step(Action(text=VOCABULARY[token_id], turn=turn))
    session.rewards.append(outcome.reward or 0.0)
    for message in outcome.messages:
        session.give(VOCABULARY.index(message.content), 0.0, is_sampled=False)


def _sample(session: _Session, index: int, version: int) -> TrainingSample:
    return TrainingSample(
        group_id=str(session.group),
        sample_index=index,
        prompt_token_ids=np.array([session.prompt], np.int32),
        completion_token_ids=np.array(session.tokens, np.int32),
        behavior_logprobs=np.array(session.logprobs, np.float32),
        policy_versions=np.full(len(session.tokens), version, np.int64),
        reward=float(sum(session.rewards)),
        loss_mask=np.array(session.mask, np.bool_),
        turn_values=np.array(session.rewards, np.float32),
    )
