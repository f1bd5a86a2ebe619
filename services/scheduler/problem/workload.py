"""Defines the workload of a planning problem: what a training step consumes, and everything that is computed on it."""

# ruff: noqa: N815 - keys carry units as written.

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.config import StrictModel
from services.scheduler.problem.output_lengths import OutputLengths
from services.scheduler.problem.quantities import Count, Name, NotNegative, Positive, with_default


class TrainTask(StrictModel):
    """Work on each sample other than generation: a forward pass, or training (three times that)."""

    name: Name
    kind: Literal["train", "infer"]
    scale: Positive = 1.0
    """Model size relative to the actor's."""
    epochs: Positive = 1.0
    shares_weights: bool = False
    """True if its weights are already in memory for another task."""
    is_service: bool = False
    """Computed by a service of its own, not by the training pool: log-probs of a frozen reference or teacher by scorers
    (`penstock serve scorer`); what is trained, and what shares its weights, by a critic (`penstock serve critic`)."""

    @property
    def is_critics(self) -> bool:
        """Whether a critic of its own computes it."""
        return self.is_service and (self.kind == "train" or self.shares_weights)


class RewardWork(StrictModel):
    """What a reward worker needs, and how long it takes to score a sample."""

    seconds_per_sample: Positive | dict[str, Positive]
    """One time for all machines, or by their GPU type with `default`."""
    at_once: Count = 1
    """Samples that a worker scores at once."""
    memory_GB: NotNegative = 0.0
    """Main memory of a worker."""
    cores: Count = 1
    """CPU cores that a worker keeps busy: a machine without GPUs must have them beside broker and Redis."""
    gpu_memory_GB: NotNegative = 0.0
    """Of a GPU that each worker has to itself, for a reward model or judge; 0: workers take no GPU."""

    @field_validator("seconds_per_sample")
    @classmethod
    def _there_is_a_default(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        return with_default(value)

    def samples_per_second(self, gpu: str) -> float:
        """Rate of one worker on a machine with GPUs of that type; empty for one without."""
        value = self.seconds_per_sample
        return self.at_once / (value.get(gpu, value["default"]) if isinstance(value, dict) else value)


class EnvironmentWork(StrictModel):
    """What sessions with an environment do beside decoding."""

    wait_s: NotNegative
    """For how long a session is in no slot of the engine, its turns together: tools run."""
    max_waiting: int = Field(default=256, ge=0, le=1_000_000)
    """Sessions of a replica that may be in none at once, beside those that decode (`generator.environment`)."""


class Workload(StrictModel):
    """The data that a training step consumes."""

    algorithm: str = ""
    """A label; `train_tasks` and `staleness` decide what is computed."""
    prompts_per_step: Count
    group_size: Count = 1
    """Responses per prompt."""
    prompt_len: Positive
    """Mean prompt length, tokens."""
    output_len: OutputLengths
    staleness: int = Field(ge=0, le=1_000_000)
    """Policy versions a sample may be behind when it is trained on; 0 is synchronous."""
    train_tasks: tuple[TrainTask, ...] = Field(min_length=1, max_length=64)
    reward: RewardWork | None = None
    """Scoring; unset: it never limits a plan, and the head's reward worker does it."""

    environment: EnvironmentWork | None = None
    """Sessions with an environment; unset: samples only decode."""

    @property
    def pool_tasks(self) -> tuple[TrainTask, ...]:
        """What the training pool computes."""
        return tuple(task for task in self.train_tasks if not task.is_service)

    @property
    def scored_task(self) -> TrainTask | None:
        """What scorers compute; None if a plan needs none."""
        return next((task for task in self.train_tasks if task.is_service and not task.is_critics), None)

    @property
    def critic_tasks(self) -> tuple[TrainTask, ...]:
        """What a critic of its own computes; empty if a plan needs none."""
        return tuple(task for task in self.train_tasks if task.is_critics)

    @model_validator(mode="after")
    def _services_have_one_model_each(self) -> Self:
        services = len(self.train_tasks) - len(self.pool_tasks)
        trained = sum(task.kind == "train" for task in self.critic_tasks)
        if services - len(self.critic_tasks) > 1 or trained > 1 or not self.pool_tasks:
            raise ValueError(
                f"train_tasks: {services} of {len(self.train_tasks)} are services; a run has one model in scorers and "
                "one critic at most, and trains"
            )
        if self.critic_tasks and not trained:
            raise ValueError(
                f"train_tasks: {self.critic_tasks[0].name} shares the weights of a critic, and no service is trained; "
                "add that task (kind train), or leave out shares_weights or is_service"
            )
        return self
