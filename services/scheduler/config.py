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
    """Folder of a small Hugging Face model to fine-tune for forecasts; null uses ridge regression alone."""
    pairs_file: Path | None = None
    """JSON lines of prompts and lengths that a new run starts from, for example a recording of an earlier run."""
    state_dir: Path | None = None
    """Folder that keeps what was learned across restarts; null keeps nothing."""

    @model_validator(mode="after")
    def _models_have_a_place(self) -> Self:
        if self.model_path is not None and self.state_dir is None:
            raise ValueError("state_dir: needed with model_path, for the models that are fitted")
        return self


class SchedulerConfig(MeasuredConfig):
    """The address it listens on."""

    listen: str = "127.0.0.1:7306"
    """Address, host:port."""
    heartbeat_interval_s: float = Field(default=5.0, gt=0, le=300)
    """How often machines report; a machine that misses three reports counts as gone."""
    cost_model: CostModelName = "rm1"
    """Cost model of the plans, as in `penstock plan --cost-model`."""
    lengths: LengthsConfig = LengthsConfig()
    """Forecasts of completion lengths."""
