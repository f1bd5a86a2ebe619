"""Names a task of reasoning_gym and its rows in a configuration."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from penstock.config import ConfigError, StrictModel

PREFIX = "reasoning_gym:"
PACKAGE = "reasoning_gym"
EVALUATION_SEED = 2**30
"""Default seed of held-out rows: a row depends on seed + index, so a small seed beside 0 would repeat training rows."""
MAX_ROWS = 2**30
MAX_SIZE = 10_000_000
"""The order of the rows is held in memory; at this size it takes 40 MB."""


class ReasoningGymSource(StrictModel):
    """Rows of a task of reasoning_gym, drawn when they are needed."""

    reasoning_gym: str = Field(pattern=r"^[a-z0-9_]{1,64}$")
    """Name of the task, for example chain_sum."""
    size: int | None = Field(default=None, ge=1, le=MAX_SIZE)
    """Rows of an epoch; null never repeats a row."""
    seed: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Of the rows: the row at an index is that of the package's data set with this seed. 0 when unset, 2**30
    for held-out rows."""
    level: int | None = Field(default=None, ge=0, le=100)
    """Level of the task's curriculum, for all of its attributes; null takes the task's defaults."""
    config: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Fields of the task's own configuration, over those of the level."""
    chat: bool = False
    """Ask by the model's chat template instead of by plain text."""
    system: str = Field(default="", max_length=16384)
    """System turn before the question, with `chat`."""

    def spec(self, index: int, *, default_seed: int = 0) -> dict[str, Any]:
        """What a worker makes the row at `index` from."""
        seed = default_seed if self.seed is None else self.seed
        return {
            "name": self.reasoning_gym,
            "seed": seed,
            "index": index,
            "level": self.level,
            "config": self.config,
        }

    def __str__(self) -> str:
        return f"{PREFIX}{self.reasoning_gym}"


def is_source(value: Any) -> bool:
    """Whether it is meant as one."""
    is_address = isinstance(value, str) and value.startswith(PREFIX)
    return is_address or isinstance(value, ReasoningGymSource) or (isinstance(value, Mapping) and PACKAGE in value)


def read_source(value: Any) -> ReasoningGymSource | None:
    """The source behind `reasoning_gym:NAME` or a mapping with a key reasoning_gym; None for anything else.

    Raises ValueError: it is meant as one, and a part of it cannot be used.
    """
    if isinstance(value, ReasoningGymSource):
        return value
    if isinstance(value, str) and value.startswith(PREFIX):
        value = {"reasoning_gym": value.removeprefix(PREFIX)}
    if not is_source(value):
        return None
    try:
        return ReasoningGymSource.model_validate(value)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ValueError("; ".join(faults)) from error


def reward_of(rows: Any, stated: Any) -> Any:
    """The reward of rows as a configuration states both: tasks bring their scorer where it names no model."""
    if not is_source(rows):
        return stated
    stated = {} if stated is None else stated
    names_none = isinstance(stated, Mapping) and not {"model", "parts"} & stated.keys()
    return {**stated, "model": PACKAGE} if names_none else stated


def require_package(what: str) -> None:
    """Raises ConfigError that says how to install it."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"{what} needs the package reasoning-gym: pip install 'penstock[reasoning-gym]', or "
            "pip install reasoning-gym==0.1.25"
        )
