"""Runs the broker process: builds its parts and serves until stopped."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from penstock.clock import Clock, SystemClock
from penstock.memory import malloc
from penstock.network import rpc
from penstock.network.metrics_server import serve_metrics
from penstock.security import NO_SECURITY, Security
from services.broker.brokers.joining import JoinedBrokers
from services.broker.config import BrokerConfig
from services.broker.load_watch import watch_load
from services.broker.loop_watch import watch_loop
from services.broker.records.store import Store
from services.broker.rules.flush_pacing import FlushInterval
from services.broker.runtime.forecasts import Forecaster
from services.broker.runtime.length_reports import LengthReporter
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.runtime.retention import Retention
from services.broker.runtime.run_registry import RunRegistry
from services.broker.service import BrokerService
from services.broker.session_service import SessionService
from services.broker.storage.stores import StoreSettings, store_kind

_log = structlog.get_logger()


def make_store(config: BrokerConfig, *, registry: CollectorRegistry, security: Security = NO_SECURITY) -> Store:
    """The store behind `redis_url`; memory:// keeps everything in this process and loses it with it.

    Raises ConfigError.
    """
    return store_kind(config.redis_url).open(
        StoreSettings(
            url=config.redis_url,
            num_wait_replicas=config.redis_wait_replicas,
            registry=registry,
            security=security,
        )
    )


def make_run_registry(
    store: Store,
    *,
    registry: CollectorRegistry,
    clock: Clock,
    scheduler: str | None = None,
    security: Security = NO_SECURITY,
    broker: str = "",
    flush_interval: FlushInterval | None = None,
) -> RunRegistry:
    """The core of a broker over a store; see `RunRegistry` for the last two."""
    metrics = BrokerMetrics(registry)
    forecaster = Forecaster(
        scheduler, security=security, clock=clock, on_answer=lambda outcome: metrics.forecasts.labels(outcome).inc()
    )
    reporter = LengthReporter(
        scheduler, security=security, on_report=lambda outcome, count: metrics.length_reports.labels(outcome).inc(count)
    )
    return RunRegistry(
        store=store,
        clock=clock,
        metrics=metrics,
        forecaster=forecaster,
        length_reporter=reporter,
        broker=broker,
        flush_interval=flush_interval,
    )


def make_server(
    run_registry: RunRegistry,
    *,
    listen: str,
    security: Security,
    brokers: JoinedBrokers | None = None,
    public_hosts: Sequence[str] = (),
) -> rpc.Server:
    """A gRPC server of that core, also for `brokers` if it is joined to others; see `rpc.Server` for `public_hosts`."""
    services = [rpc.service_of(BrokerService(run_registry, brokers)), rpc.service_of(SessionService(run_registry))]
    if brokers is not None:
        services.append(brokers.service)
    # Healthy once the caretaker has seen the store.
    return rpc.Server(
        listen=listen, services=services, security=security, serves_at_once=False, public_hosts=public_hosts
    )


async def serve(config: BrokerConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortUnavailableError."""
    malloc.keep_large_buffers()
    # Imported objects live as long as the process, and most objects that calls create die young.
    gc.freeze()
    security = Security.from_environment(insecure=config.insecure)
    serve_metrics(config.metrics_address, security)
    store = make_store(config, registry=REGISTRY, security=security)
    clock = SystemClock()
    # A broker that is started again takes the place of its predecessor, so that no other one waits for that.
    name = config.broker_name
    flush_interval = FlushInterval(config.max_flush_interval_s)
    run_registry = make_run_registry(
        store,
        registry=REGISTRY,
        clock=clock,
        scheduler=config.scheduler,
        security=security,
        broker=name,
        flush_interval=flush_interval,
    )
    brokers = JoinedBrokers(run_registry, name=name, address=config.address, security=security)
    server = make_server(
        run_registry, listen=config.listen, security=security, brokers=brokers, public_hosts=config.public_hosts
    )
    try:
        await rpc.run_until_stopped(
            server,
            loops=[
                lambda: run_registry.care(server.set_serving),
                *brokers.loops,
                run_registry.length_reporter.run,
                lambda: watch_loop(run_registry.metrics, clock),
                lambda: watch_load(
                    flush_interval,
                    run_registry.heartbeat_interval,
                    run_registry.saturation,
                    run_registry.metrics,
                    clock,
                ),
                Retention(run_registry, keep_s=config.closed_run_retention_s).run,
            ],
            on_started=lambda: _log.info("broker serves", listen=config.listen),
            before_stop=run_registry.stop,
        )
    finally:
        await brokers.leave()
        await run_registry.leave()
        await run_registry.length_reporter.close()
        await run_registry.forecaster.close()
        await store.close()
