"""Reads completions with known scores, and compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.config import ConfigError, StrictModel
from penstock.rewards import RewardItem, Turn
from penstock.rewards.score_messages import MAX_METADATA_BYTES, write_item
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.score_rules import is_reward
from services.reward.canaries.config import CanariesConfig

MAX_BYTES = 16 * 1024**2
MAX_CANARIES = 1024


class _Turn(StrictModel):
    role: str
    content: str


class _Line(StrictModel):
    prompt: str | list[_Turn] = ""
    completion: str
    answer: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    is_truncated: bool = False
    value: float | None = None
    status: Literal["ok", "abstained", "invalid", "candidate_limit"] | None = None
    tolerance: float | None = Field(default=None, ge=0)

    @field_validator("metadata")
    @classmethod
    def _is_small(cls, value: dict[str, Any]) -> dict[str, Any]:
        if len(json.dumps(value)) > MAX_METADATA_BYTES:
            raise ValueError(f"longer than {MAX_METADATA_BYTES} bytes as JSON")
        return value

    @model_validator(mode="after")
    def _says_what_is_known(self) -> _Line:
        is_ok = self.status in (None, "ok")
        if is_ok != (self.value is not None):
            raise ValueError("give the known value, or a known status other than ok")
        if self.value is not None and not is_reward(self.value):
            raise ValueError(f"value {self.value} is no reward")
        return self


class Canary:
    """One completion and its known score."""

    def __init__(self, line: _Line, *, number: int, tolerance: float) -> None:
        """`number` is that of its line in the file."""
        self._line = line
        self._number = number
        self._tolerance = tolerance if line.tolerance is None else line.tolerance

    def lease(self) -> broker_pb2.ScoringLease:
        """The lease under which it is scored, as a sample's; no broker knows it."""
        turns = () if isinstance(self._line.prompt, str) else self._line.prompt
        item = write_item(
            RewardItem(
                prompt=self._line.prompt if isinstance(self._line.prompt, str) else "",
                messages=[Turn(role=turn.role, content=turn.content) for turn in turns],
                completion=self._line.completion,
                answer=self._line.answer,
                metadata=self._line.metadata,
                is_truncated=self._line.is_truncated,
                must_be_fresh=True,
            )
        )
        return broker_pb2.ScoringLease(lease_id=f"canary-{self._number}", item=item)

    def drift(self, score: types_pb2.Score) -> str:
        """How the score differs from the known one, in words; empty if it does not."""
        status = types_pb2.ScoreStatus.Name(score.status).removeprefix("SCORE_STATUS_").lower()
        known = self._line.status or "ok"
        if known != "ok" or status != "ok":
            because = f" ({score.message})" if score.message else ""
            return "" if status == known else f"line {self._number} got {status}{because}, known is {self._known}"
        assert self._line.value is not None
        if abs(score.value - self._line.value) <= self._tolerance:
            return ""
        return f"line {self._number} got {score.value:.6g}, known is {self._known}"

    @property
    def _known(self) -> str:
        if self._line.value is None:
            return str(self._line.status)
        return f"{self._line.value:.6g}" + (f" (tolerance {self._tolerance:g})" if self._tolerance else "")


def read_canaries(config: CanariesConfig) -> list[Canary]:
    """The canaries of a file. Raises ConfigError that names the line and the fix."""
    where = f"reward.canaries.path: {config.path}"
    try:
        if config.path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{where}: larger than {MAX_BYTES} bytes")
        lines = Path(config.path).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from error
    canaries = [
        Canary(_read(line, f"{where}, line {number}"), number=number, tolerance=config.tolerance)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not 1 <= len(canaries) <= MAX_CANARIES:
        raise ConfigError(f"{where}: {len(canaries)} canaries; 1 to {MAX_CANARIES} are possible")
    return canaries


def _read(line: str, where: str) -> _Line:
    try:
        return _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        problem = ".".join(map(str, first["loc"])) + f": {first['msg'].removeprefix('Value error, ')}"
        raise ConfigError(f"{where}: {problem.removeprefix(': ')}") from error
