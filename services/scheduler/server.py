"""Runs a scheduler process."""

from __future__ import annotations

import asyncio

import structlog

from penstock.clock import SystemClock
from penstock.rpc import Server, Service, run_until_stopped
from penstock.security import Security
from penstock.telemetry import serve_metrics
from penstock.v1 import scheduler_pb2_grpc
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerServicer

SERVICE_NAME = "penstock.v1.SchedulerService"

_log = structlog.get_logger()


async def serve(config: SchedulerConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortUnavailableError."""
    serve_metrics(config.metrics_port)
    servicer = SchedulerServicer(clock=SystemClock(), heartbeat_interval_s=config.heartbeat_interval_s)
    service = Service(
        name=SERVICE_NAME, add=scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, servicer=servicer
    )
    server = Server(listen=config.listen, services=[service], security=Security.from_environment())

    async def end_streams() -> None:
        await server.stopping.wait()
        servicer.stopping.set()
        await asyncio.Event().wait()

    await run_until_stopped(
        server, loops=[end_streams], on_started=lambda: _log.info("scheduler listens", listen=config.listen)
    )
