"""Runs a scorer process: a worker of one run, and its health and speed over gRPC."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from penstock.clients.scoring import ScoringSession
from penstock.config import ConfigError
from penstock.network.connection import Connection
from penstock.network.metrics_server import serve_metrics
from penstock.network.readiness import follow_outage
from penstock.network.rpc import Server, run_until_stopped
from penstock.process.grace_periods import DRAIN_S
from penstock.security import Security
from penstock.storage.fetched import fetched
from penstock.v1 import broker_pb2
from services.trainer.compute.speed import speed_service
from services.trainer.scorer.config import ScorerConfig
from services.trainer.scorer.pool import HungPassError, LogprobPool

_log = structlog.get_logger()


async def serve(config: ScorerConfig) -> None:
    """Compute log-probs until SIGTERM or SIGINT; waits for broker and run as long as they are away.

    It listens once its model is loaded.

    Raises:
        ConfigError: There is no usable model.
        PortUnavailableError: The address cannot be listened on.
        PenstockError: The broker refuses this process for good.
    """
    security = Security.from_environment(insecure=config.insecure)
    serve_metrics(config.metrics_address, security)
    session = ScoringSession(
        Connection(config.broker, security=security),
        run_id=config.run_id,
        worker_id=security.named(config, "worker_id").worker_id,
        max_leases=config.max_leases,
        task=broker_pb2.SCORING_TASK_REFERENCE_LOGPROBS,
    )
    pool = await asyncio.to_thread(_pool, config, session)
    server = Server(listen=config.listen, services=[speed_service(pool.speed)], security=security)

    async def drain() -> None:
        num_left = await session.drain(timeout_s=DRAIN_S)
        if num_left:
            _log.warning("stopped with samples unscored; their leases expire and go to another scorer", num=num_left)

    def announce() -> None:
        _log.info(
            "scorer listens",
            listen=config.listen,
            model=str(config.model_path),
            broker=config.broker,
            run_id=config.run_id,
        )

    loops: list[Callable[[], Coroutine[Any, Any, None]]] = [
        session.run,
        pool.run,
        partial(follow_outage, server.set_serving, lambda: session.outage),
    ]
    try:
        await run_until_stopped(server, loops=loops, on_started=announce, before_stop=drain)
    except HungPassError as error:
        _log.error("the process ends, and its leases go to another scorer", error=str(error))
        # A normal end would wait for the thread of that pass.
        os._exit(1)


def _pool(config: ScorerConfig, session: ScoringSession) -> LogprobPool:
    # Imported here: torch takes seconds, and the configuration's errors should not wait for it.
    from services.trainer.model.backend import BackendError
    from services.trainer.scorer.frozen_model import FrozenModel

    folder = fetched("model_path", config.model_path, "model")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model_path: {config.model_path}: no config.json; give a Hugging Face directory")
    try:
        model = FrozenModel(folder, dtype=config.dtype, device=config.device, num_threads=config.num_threads)
    except (OSError, BackendError) as error:
        raise ConfigError(f"model_path: {config.model_path}: no usable model: {error}") from error
    return LogprobPool(
        session,
        model,
        tokens_per_pack=config.tokens_per_pack,
        max_batch_size=config.max_leases // 2,
        max_pass_s=config.max_pass_s,
    )
