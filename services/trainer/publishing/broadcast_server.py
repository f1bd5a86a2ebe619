"""Broadcasts as the trainer's configuration asks for them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import structlog

from penstock.collective.broadcast_backend import Transport
from penstock.network.rpc import PortUnavailableError
from penstock.security import Security
from services.trainer.config import TrainerConfig
from services.trainer.publishing.broadcasts import Broadcasts, BroadcastSettings
from services.trainer.publishing.version_store import WeightStore

_ANY_ADDRESS = ("", "0.0.0.0", "::")
_log = structlog.get_logger()


@asynccontextmanager
async def broadcasting(
    config: TrainerConfig, *, store: WeightStore, weights_url: str, security: Security
) -> AsyncIterator[Broadcasts | None]:
    """The broadcasts of a store's contents; None if weights are sent over HTTP only.

    Raises:
        PortUnavailableError: `broadcast_listen` cannot be listened on.
        ConfigError: It is reached from other machines, and the configuration does not trust the network.
    """
    if config.weights_transport is Transport.HTTP:
        yield None
        return
    listen = config.broadcast_listen or f"{config.weights_listen.rpartition(':')[0]}:0"
    if not config.trusts_network:
        security.admit_plain_listener(
            listen, setting="broadcast_listen", fix="set weights_transport to http, or trusts_network to true"
        )
    host = listen.rpartition(":")[0].strip("[]")
    settings = BroadcastSettings(
        backend=config.weights_transport,
        public_host=(urlsplit(weights_url).hostname or host) if host in _ANY_ADDRESS else host,
        gather_s=config.broadcast_gather_s,
        stall_s=config.broadcast_stall_s,
    )
    broadcasts = Broadcasts(settings, listener=_listener(listen), find_content=store.find_content)
    _log.info(
        "weights are broadcast, unencrypted, to generators that ask",
        transport=config.weights_transport,
        host=settings.public_host,
    )
    try:
        yield broadcasts
    finally:
        await broadcasts.close()


def _listener(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), int(port)), family=family)
    except (OSError, ValueError) as error:
        raise PortUnavailableError(
            f"cannot listen on {listen} (broadcast_listen): {error}; stop the other process or choose another port"
        ) from error
