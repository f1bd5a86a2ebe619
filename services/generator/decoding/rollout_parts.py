"""What decoding samples needs, beside the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.clients.sharding.sharded_tokens import ShardedTokens
from penstock.model.model_folder import TextDecoder
from penstock.process.busy_time import BusyTracker
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.engine import Engine
from services.generator.environments.sessions import EnvironmentSessions
from services.generator.metrics import GeneratorMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """What decoding a sample needs."""

    engine: Engine
    tokens: ShardedTokens
    held: AttestedWeights
    text: TextDecoder
    end_token_ids: tuple[int, ...]
    busy: BusyTracker
    metrics: GeneratorMetrics
    records_routes: bool = False
    """Whether the run's trainer replays routes, and the engine records them."""
    on_change: Callable[[], None]
    """Called when slots or leases changed."""
    on_engine_failure: Callable[[Exception], None]
    """Called when the engine has failed."""
    sessions: EnvironmentSessions | None = None
    """Sessions with the run's environment; None without one."""
