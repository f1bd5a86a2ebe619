"""Settings of the reward `judge`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config import StrictModel

CriterionName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,47}$")]
CriterionText = Annotated[str, Field(min_length=1, max_length=2000)]


class JudgeConfig(StrictModel):
    """Which model judges, by what, and how it is called."""

    url: str = Field(pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$", max_length=1024)
    """Base address of an OpenAI-compatible API, for example https://api.openai.com/v1; `/chat/completions` follows."""
    model: str = Field(min_length=1, max_length=256)
    """The model that is asked for."""
    key_variable: str = Field(default="PENSTOCK_JUDGE_API_KEY", pattern=r"^[A-Z][A-Z0-9_]*$", max_length=128)
    """Environment variable that holds the API key; with _FILE at its end, the file that does. Unset shows none."""
    instructions: str = Field(default="", max_length=8000)
    """What completions are asked to do, in words, for the judge."""
    rubric: dict[CriterionName, CriterionText] = Field(default_factory=dict, max_length=16)
    """Criteria by name, each scored; without any, a completion is compared with the row's reference answer."""
    shows_turns: bool = False
    """Show the judge the whole exchange of a sample that talked with an environment, beside what the model wrote."""
    scale: tuple[int, int] = (0, 10)
    """Least and most of a criterion, whole numbers; the reward is the mean over criteria, as a share of the scale."""
    votes: int = Field(default=1, ge=1, le=32)
    """Answers asked for each sample: a criterion's score is their median, a comparison's verdict their majority."""
    quorum: int | None = Field(default=None, ge=1, le=32)
    """Fewest usable votes; by default more than half."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of the judge; the seed of a vote is its number."""
    max_tokens: int = Field(default=1024, ge=16, le=65536)
    """Most tokens of an answer."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """Structured output that the endpoint is asked for; what it answers is checked against the schema all the same."""
    body: dict[str, Any] = Field(default_factory=dict, max_length=32)
    """Further fields of each request; null leaves one out, for example {max_tokens: null}."""
    request_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Deadline of one request, seconds; never beyond the batch's."""
    max_concurrent: int = Field(default=64, ge=1, le=4096)
    """Most requests under way at once."""
    requests_per_second: float | None = Field(default=None, gt=0, le=100_000)
    """Most requests begun a second; unlimited if null."""
    cache_mb: int = Field(default=64, ge=0, le=65536)
    """Memory for answers, which are asked for once; the least recently used are forgotten first."""
    max_characters: int = Field(default=100_000, ge=100, le=10_000_000)
    """Longest prompt, completion, reference answer and turns together; a longer sample is invalid."""
    prompt_price: float = Field(default=0.0, ge=0, le=1e6)
    """Price of a million prompt tokens, in any currency, for the metrics."""
    completion_price: float = Field(default=0.0, ge=0, le=1e6)
    """Price of a million completion tokens."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        least, most = self.scale
        if not (-1000 <= least < most <= 1000 and most - least <= 100):
            raise ValueError(
                f"scale: {least} to {most}; least must be below most, by at most 100, within -1000 and 1000"
            )
        if self.quorum is not None and self.quorum > self.votes:
            raise ValueError(f"quorum: {self.quorum} of {self.votes} votes; at most votes")
        taken = sorted({"model", "messages", "stream", "n"} & self.body.keys())
        if taken:
            raise ValueError(f"body: {taken[0]} cannot be set there")
        return self

    @property
    def least_votes(self) -> int:
        """Fewest usable votes of a sample."""
        return self.quorum or self.votes // 2 + 1
