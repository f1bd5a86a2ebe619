"""Settings of a scheduler process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.config import MeasuredConfig, StrictModel

CostModelName = Literal["rm1", "calibrated"]
"""The reference model, and the one fitted to published runs."""


class LengthsConfig(StrictModel):
    """Forecasts of completion lengths; see docs/lengths.md."""

    model_path: Path | None = None
    """Folder of a small Hugging Face model that is fine-tuned to forecast; ridge regression alone when null."""
    pairs_file: Path | None = None
    """JSON lines of prompts and lengths that a new run begins with, a recording of an earlier run for example."""
    state_dir: Path | None = None
    """Where what was learned is kept over restarts; nowhere when null."""

    @model_validator(mode="after")
    def _models_have_a_place(self) -> Self:
        if self.model_path is not None and self.state_dir is None:
            raise ValueError("state_dir: needed with model_path, for the models that are fitted")
        return self


class SchedulerConfig(MeasuredConfig):
    """Where it listens."""

    listen: str = "127.0.0.1:7306"
    """Address, host:port."""
    heartbeat_interval_s: float = Field(default=5.0, gt=0, le=300)
    """How often machines report; three missed reports make a machine count as gone."""
    cost_model: CostModelName = "rm1"
    """What plans are made with, as of `penstock plan --cost-model`."""
    lengths: LengthsConfig = LengthsConfig()
    """Forecasts of completion lengths."""
