"""Configures the transformers engine, without importing transformers."""

from __future__ import annotations

from typing import Literal

from penstock.process.packages import ENGINE_PACKAGES
from services.generator.engine.engine import Engine
from services.generator.engines.base_config import BaseEngineConfig, ServedModel


class TransformersEngineConfig(BaseEngineConfig):
    """Hugging Face transformers, where vLLM cannot be installed."""

    packages = ENGINE_PACKAGES["transformers"]
    has_tensor_parallel = False
    can_record_routes = True

    engine: Literal["transformers"] = "transformers"
    """The engine."""

    def build(self, model: ServedModel) -> Engine:
        """See `BaseEngineConfig.build`."""
        from services.generator.engines.transformers.transformers_engine import TransformersEngine

        return TransformersEngine(self, model)
