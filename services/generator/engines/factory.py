"""Building the engine a configuration asks for; nothing heavy is imported for the others."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import penstock
from penstock.process.packages import installed_version
from services.generator.engine.engine import Engine
from services.generator.engines.base_config import BaseEngineConfig, ServedModel


@runtime_checkable
class PausableEngine(Protocol):
    """An engine that can stand still between two decoding steps and keep all its state."""

    async def pause(self) -> None:
        """Sample nothing more until `resume`; idempotent."""

    async def resume(self) -> None:
        """Go on; idempotent."""


class _WithEngine(ServedModel, Protocol):
    @property
    def engine(self) -> BaseEngineConfig: ...


def build_engine(config: _WithEngine) -> Engine:
    """The engine, not started. Raises ValueError where the model's folder cannot be understood."""
    return config.engine.build(config)


def engine_version(engine: BaseEngineConfig) -> str:
    """Version of the engine's package, Penstock's own for one that needs none."""
    return installed_version(*engine.packages) or penstock.__version__
