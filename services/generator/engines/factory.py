"""Builds the engine that a configuration selects, without importing the others' heavy libraries."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import penstock
from penstock.process.packages import installed_version
from services.generator.engine.engine import Engine
from services.generator.engines.base_config import BaseEngineConfig, ServedModel


@runtime_checkable
class PausableEngine(Protocol):
    """An engine that can pause between two decoding steps and keep all its state."""

    async def pause(self) -> None:
        """Stop sampling until `resume`; idempotent."""

    async def resume(self) -> None:
        """Continue sampling; idempotent."""


class _WithEngine(ServedModel, Protocol):
    @property
    def engine(self) -> BaseEngineConfig: ...


def build_engine(config: _WithEngine) -> Engine:
    """The engine, not started. Raises ValueError if the model's folder is malformed."""
    return config.engine.build(config)


def engine_version(engine: BaseEngineConfig) -> str:
    """Version of the engine's package, or Penstock's own if it needs none."""
    return installed_version(*engine.packages) or penstock.__version__
