"""Settings of canaries."""

from __future__ import annotations

from pydantic import Field

from penstock.config import LocalPath, StrictModel


class CanariesConfig(StrictModel):
    """Which completions have known scores, and how often they are scored again."""

    path: LocalPath
    """JSON lines: `prompt` (text or chat messages), `completion`, `answer`, `metadata`, and the `value` or `status`
    that is known."""
    every: int = Field(default=1000, ge=1, le=10_000_000)
    """Samples scored between two rounds of all canaries; the first round comes before the first sample."""
    tolerance: float = Field(default=1e-6, ge=0, le=1e12)
    """How far a value may be from the known one; a line may have a `tolerance` of its own."""
