"""Wires together how published weights reach this generator: store, broadcasts, relay, downloads and puller."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from penstock.clients.weights import WeightsClient
from penstock.collective.broadcast_backend import Transport
from penstock.downloads.broadcast_receiver import BroadcastReceiver
from penstock.downloads.downloader import Downloader
from penstock.downloads.relay_wait import RelayWait
from penstock.network.http_server import public_url
from penstock.security import Security
from penstock.transfer.relay import Relay
from services.generator.config import GeneratorConfig
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.engine import Engine
from services.generator.metrics import GeneratorMetrics
from services.generator.weights.puller import Drained, WeightPuller


def build_puller(
    config: GeneratorConfig,
    *,
    generator_id: str,
    cache_dir: Path,
    engine: Engine,
    held: AttestedWeights,
    drained: Drained,
    metrics: GeneratorMetrics,
    security: Security,
) -> tuple[WeightPuller, list[AbstractAsyncContextManager[object]]]:
    """What keeps the engine on the newest version, and the connections to enter around its loops, in order.

    Args:
        config: The generator's.
        generator_id: Its name at the store.
        cache_dir: Folder of its weight files.
        engine: Installs the versions.
        held: Receives attested versions.
        drained: For updates that must not meet running samples.
        metrics: Counts bytes, swaps and refusals.
        security: Credentials of the process.
    """
    store = WeightsClient(
        config.weights, run_id=config.run_id, receiver_id=generator_id, site=config.site, security=security
    )
    relay = _relay(config, metrics, security) if config.site else None
    broadcasts = _broadcasts(config, metrics, store)
    downloader = Downloader(
        security=security,
        broadcasts=broadcasts,
        relay=relay,
        find_relays=store.find_relays,
        max_bytes_per_second=config.max_fetch_bytes_per_second,
        compresses=config.compresses_fetches,
        on_fetched=lambda kind, num_bytes: metrics.fetched_bytes.labels(kind).inc(num_bytes),
    )
    downloader.faults.report = store.report_failure
    if config.site:
        downloader.relay_wait = RelayWait(store.find_relays, patience_s=config.relay_patience_s)
    puller = WeightPuller(
        client=store,
        downloader=downloader,
        engine=engine,
        held=held,
        drained=drained,
        cache_dir=cache_dir,
        metrics=metrics,
        mode=config.engine.update_mode,
    )
    return puller, [each for each in (store, relay, broadcasts, downloader) if each is not None]


def _broadcasts(config: GeneratorConfig, metrics: GeneratorMetrics, store: WeightsClient) -> BroadcastReceiver | None:
    if config.weights_transport is Transport.HTTP:
        return None
    store.joins_broadcasts = True
    return BroadcastReceiver(
        store,
        backend=config.weights_transport,
        on_received=metrics.fetched_bytes.labels("broadcast").inc,
        on_end=lambda outcome: metrics.broadcasts.labels(outcome).inc(),
    )


def _relay(config: GeneratorConfig, metrics: GeneratorMetrics, security: Security) -> Relay:
    host = config.listen.rpartition(":")[0]
    return Relay(
        listen=config.relay_listen or f"{host}:0",
        public_url=None
        if config.relay_url is None
        else public_url(config.relay_url, setting="relay_url", security=security),
        peer=config.weights,
        security=security,
        site=config.site,
        max_bytes_per_second=config.max_relay_bytes_per_second,
        on_served=metrics.relayed_bytes.inc,
    )
