"""Settings of a scheduler process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.config import StrictModel


class LengthsConfig(StrictModel):
    """Forecasts of completion lengths; see docs/lengths.md."""

    model: Literal["ridge", "transformer"] = "ridge"
    """What forecasts: ridge regression on n-grams, or a small transformer, with ridge beside it."""
    model_path: Path | None = None
    """Folder of the Hugging Face model that `transformer` fine-tunes."""
    pairs_file: Path | None = None
    """JSON lines of prompts and lengths that a new run begins with, a recording of an earlier run for example."""
    state_dir: Path | None = None
    """Where what was learned is kept over restarts; nowhere when null."""
    refresh_interval_s: float = Field(default=10.0, gt=0, le=3600)
    """How often it is looked whether there is enough new to fit a model again."""

    @model_validator(mode="after")
    def _transformer_has_a_model(self) -> Self:
        if (self.model == "transformer") != (self.model_path is not None):
            raise ValueError("model_path: needed with model: transformer, and with that only")
        return self


class SchedulerConfig(StrictModel):
    """Where it listens."""

    listen: str = "127.0.0.1:7306"
    """Address, host:port."""
    heartbeat_interval_s: float = Field(default=5.0, gt=0, le=300)
    """How often machines report; three missed reports make a machine count as gone."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Prometheus endpoint; none when unset."""
    lengths: LengthsConfig = LengthsConfig()
    """Forecasts of completion lengths."""
