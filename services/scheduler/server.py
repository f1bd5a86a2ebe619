"""Runs a scheduler process."""

from __future__ import annotations

from functools import partial

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from penstock.clock import Clock, SystemClock
from penstock.network.metrics_server import serve_metrics
from penstock.network.rpc import Server, run_until_stopped, service_of
from penstock.security import Security
from services.scheduler.config import LengthsConfig, SchedulerConfig
from services.scheduler.lengths.forecaster import LengthForecaster
from services.scheduler.lengths.length_model import Learner
from services.scheduler.lengths.metrics import LengthMetrics
from services.scheduler.lengths.pairs_file import read_pairs
from services.scheduler.lengths.ridge import RidgeLearner
from services.scheduler.lengths.state_files import StateFiles
from services.scheduler.lengths.transformer import TransformerLearner
from services.scheduler.service import SchedulerServicer

_log = structlog.get_logger()


def make_forecaster(config: LengthsConfig, *, clock: Clock, registry: CollectorRegistry) -> LengthForecaster:
    """The forecaster of a scheduler. Raises ConfigError if its file of pairs cannot be used."""
    learners: list[Learner] = [RidgeLearner()]
    if config.model_path is not None:
        assert config.state_dir is not None
        learners.insert(0, TransformerLearner(config.model_path, config.state_dir / "transformer"))
    return LengthForecaster(
        learners=learners,
        first_pairs=read_pairs(config.pairs_file) if config.pairs_file is not None else (),
        files=StateFiles(config.state_dir) if config.state_dir is not None else None,
        clock=clock,
        metrics=LengthMetrics(registry),
    )


async def serve(config: SchedulerConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortUnavailableError, ConfigError."""
    security = Security.from_environment(insecure=config.insecure)
    serve_metrics(config.metrics_address, security)
    clock = SystemClock()
    lengths = make_forecaster(config.lengths, clock=clock, registry=REGISTRY)
    servicer = SchedulerServicer(
        clock=clock,
        heartbeat_interval_s=config.heartbeat_interval_s,
        lengths=lengths,
        cost_model=config.cost_model,
    )
    server = Server(listen=config.listen, services=[service_of(servicer)], security=security)
    servicer.stopping = server.stopping
    try:
        await run_until_stopped(
            server,
            loops=[
                servicer.revise_forever,
                *(partial(lengths.refresh_forever, learner) for learner in lengths.learners),
            ],
            on_started=lambda: _log.info("scheduler listens", listen=config.listen),
        )
    finally:
        await lengths.close()
