"""Configures the emulated engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.generator.engine.engine import Engine
from services.generator.engines.base_config import BaseEngineConfig, ServedModel


class EmulatedEngineConfig(BaseEngineConfig):
    """Emulates a GPU: scripted tokens in the time that a GPU would take."""

    is_emulated = True
    has_pipeline_stages = True

    engine: Literal["emulated"] = "emulated"
    """The engine."""
    emulated_tokens_per_second: float = Field(default=2000.0, gt=0)
    """Total speed of an emulated engine over all samples."""
    emulated_mean_tokens: int = Field(default=45, ge=1)
    """Mean completion length of an emulated engine."""

    def build(self, model: ServedModel) -> Engine:
        """See `BaseEngineConfig.build`."""
        from services.generator.engines.emulated.emulated_engine import EmulatedEngine
        from services.generator.engines.emulated.from_config import build_spec

        return EmulatedEngine(build_spec(self, model))
