"""Runs TRL's GRPOTrainer on the benchmark's task: `python trl_worker.py TASK_JSON OUT.jsonl`, in TRL's environment.

Imports the standard library, what TRL brings and the reward's own text rules, never Penstock's packages. Writes one
line when training begins and one a step: {"time": Unix seconds} and {"time", "reward", "num_samples", "num_tokens"}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from services.reward.models.answers import final_answer, normalised


class StepLines(TrainerCallback):  # type: ignore[misc]
    """Writes the lines, scores completions meanwhile, and ends training once the reward is reached."""

    def __init__(self, path: Path, *, until_reward: float | None, window_steps: int) -> None:
        self._path = path
        self._until_reward = until_reward
        self._window_steps = window_steps
        self._rewards: list[float] = []
        self._last: dict[str, float] = {}

    def score(self, completions: list[str], answer: list[str], completion_ids: list[Any], **_: object) -> list[float]:
        """The reward function: what `exact_match` gives."""
        rewards = [_exact_match(*pair) for pair in zip(completions, answer, strict=True)]
        self._rewards.append(sum(rewards) / len(rewards))
        num_tokens = sum(len(ids) for ids in completion_ids)
        self._last = {"reward": self._rewards[-1], "num_samples": len(rewards), "num_tokens": num_tokens}
        return rewards

    def on_train_begin(self, _arguments: Any, _state: Any, _control: Any, **_: object) -> None:
        """Start the clock."""
        self._write({})

    def on_step_end(self, _arguments: Any, _state: Any, control: Any, **_: object) -> None:
        """Record an optimiser step."""
        self._write(self._last)
        last = self._rewards[-self._window_steps :]
        is_full = len(last) == self._window_steps
        if self._until_reward is not None and is_full and sum(last) / len(last) >= self._until_reward:
            control.should_training_stop = True

    def _write(self, numbers: dict[str, float]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **numbers}) + "\n")


def _exact_match(completion: str, answer: str) -> float:
    given = final_answer(completion)
    return float(given is not None and normalised(given) == normalised(answer))


def train(task: dict[str, Any], out: Path) -> None:
    """Train; `task` is `benchmarks.e2e.task.Task` as a document."""
    torch.set_num_threads(task["num_threads"])
    lines = StepLines(out, until_reward=task["until_reward"], window_steps=task["window_steps"])
    batch = task["group_size"] * task["prompts_per_step"]
    settings = GRPOConfig(
        output_dir=str(out.with_suffix(".trainer")),
        use_cpu=True,
        bf16=False,
        seed=task["seed"],
        max_steps=task["num_steps"],
        per_device_train_batch_size=batch // task["num_microbatches"],
        gradient_accumulation_steps=task["num_microbatches"],
        num_generations=task["group_size"],
        max_completion_length=task["max_new_tokens"],
        temperature=task["temperature"],
        top_k=0,
        learning_rate=task["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=task["max_grad_norm"],
        optim="adamw_torch_fused",
        # Without KL there is no reference model; advantages and averaging are those of Penstock's dr_grpo over tokens.
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=task["model_dir"],
        reward_funcs=lines.score,
        args=settings,
        train_dataset=load_dataset(
            "json", data_files=task["train_path"], split="train", cache_dir=str(out.with_suffix(".data"))
        ),
        callbacks=[lines],
    )
    trainer.train()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), Path(sys.argv[2]))
