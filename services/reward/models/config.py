"""Settings of the built-in rules."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from penstock.config import StrictModel

TagName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,31}$")]


class FormatConfig(StrictModel):
    """The tags that a completion has to have."""

    tags: tuple[TagName, ...] = Field(default=("think", "answer"), min_length=1, max_length=16)
    """In their order; each has to be opened and closed once, before the next one is opened."""
    allows_other_text: bool = True
    """Whether there may be text beside the tags; white space may be in any case."""
    opened_by_prompt: bool = False
    """The prompt has opened the first tag, as some chat templates do; the completion must not open it again."""

    @model_validator(mode="after")
    def _tags_differ(self) -> Self:
        if len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags: {', '.join(self.tags)} name one twice; each has to occur once")
        return self


class LengthConfig(StrictModel):
    """How many tokens a completion may have: `max_tokens` and `buffer_tokens`, or `target_tokens`."""

    max_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """From here on the value is -1."""
    buffer_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """How long before `max_tokens` the value begins to fall from 0."""
    target_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """Here the value is 0; it falls linearly on both sides, down to -1 for nothing and for twice as many."""

    @model_validator(mode="after")
    def _is_one_rule(self) -> Self:
        has_limit = self.max_tokens is not None or self.buffer_tokens is not None
        if has_limit == (self.target_tokens is not None):
            raise ValueError("give max_tokens and buffer_tokens, or target_tokens alone")
        if has_limit and (self.max_tokens is None or self.buffer_tokens is None):
            raise ValueError("max_tokens and buffer_tokens belong together; give both")
        if self.max_tokens is not None and self.buffer_tokens is not None and self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens: {self.buffer_tokens} is more than max_tokens, {self.max_tokens}")
        return self


class NgramRepetitionConfig(StrictModel):
    """Which n-grams count, and how much."""

    n: int = Field(default=4, ge=1, le=64)
    """Words or tokens in an n-gram."""
    unit: Literal["words", "tokens"] = "words"
    """Words are what white space separates, without regard to case."""
    cap: float = Field(default=1.0, gt=0, le=1)
    """A larger share counts as this one."""
