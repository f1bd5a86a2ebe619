"""Wires together how published weights reach this generator: store, broadcasts, relay, downloads and puller."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from penstock.clients.weights import WeightsClient
from penstock.collective.broadcast_backend import Transport
from penstock.downloads.broadcast_receiver import BroadcastReceiver
from penstock.downloads.downloader import Downloader
from penstock.network.http_server import public_url
from penstock.security import Security
from penstock.transfer.relay import Relay
from services.generator.config import GeneratorConfig
from services.generator.decoding.drain import Drain
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.engine import Engine
from services.generator.metrics import GeneratorMetrics
from services.generator.weights.puller import WeightPuller


class WeightIntake:
    """Use as an async context manager around the loops of `puller`.

    Args:
        config: The generator's.
        generator_id: Its name at the store.
        cache_dir: Folder of its weight files.
        engine: Installs the versions.
        held: Receives attested versions.
        drain: For updates that must not meet running samples.
        metrics: Counts bytes, swaps and refusals.
        security: Credentials of the process.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        generator_id: str,
        cache_dir: Path,
        engine: Engine,
        held: AttestedWeights,
        drain: Drain,
        metrics: GeneratorMetrics,
        security: Security,
    ) -> None:
        self._resources = AsyncExitStack()
        self._store = WeightsClient(
            config.weights, run_id=config.run_id, receiver_id=generator_id, site=config.site, security=security
        )
        self._relay = _relay(config, metrics, security) if config.site else None
        self._broadcasts = _broadcasts(config, metrics, self._store)
        self._downloader = Downloader(
            security=security,
            broadcasts=self._broadcasts,
            relay=self._relay,
            find_relays=self._store.find_relays,
            max_bytes_per_second=config.max_fetch_bytes_per_second,
            compresses=config.compresses_fetches,
            on_fetched=lambda kind, num_bytes: metrics.fetched_bytes.labels(kind).inc(num_bytes),
        )
        self._downloader.faults.report = self._store.report_failure
        self.puller = WeightPuller(
            client=self._store,
            downloader=self._downloader,
            engine=engine,
            held=held,
            drain=drain,
            cache_dir=cache_dir,
            metrics=metrics,
            mode=config.engine.update_mode,
        )
        """Keeps the engine on the newest version."""

    async def __aenter__(self) -> Self:
        """Open the connections."""
        await self._resources.enter_async_context(self._store)
        if self._relay is not None:
            await self._resources.enter_async_context(self._relay)
        if self._broadcasts is not None:
            await self._resources.enter_async_context(self._broadcasts)
        await self._resources.enter_async_context(self._downloader)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Close every connection."""
        await self._resources.aclose()


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
