"""The libraries that carry broadcasts, as configurations and messages spell them."""

from __future__ import annotations

from enum import StrEnum

from penstock.v1 import weights_pb2


class Transport(StrEnum):
    """How weights travel inside a site."""

    HTTP = "http"
    """Every receiver fetches them, from the origin or from a relay."""
    GLOO = "gloo"
    """Broadcast over TCP between processors; what a broadcast does not bring is fetched."""
    NCCL = "nccl"
    """Broadcast between GPUs; what a broadcast does not bring is fetched."""


BACKENDS = {
    Transport.GLOO: weights_pb2.BROADCAST_BACKEND_GLOO,
    Transport.NCCL: weights_pb2.BROADCAST_BACKEND_NCCL,
}
"""The transports that are broadcasts, as messages spell them."""
