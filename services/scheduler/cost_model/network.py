"""Computes transfer times over the links between regions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from services.scheduler.problem.problem import Link


class Network:
    """Bandwidth and latency between regions, the same in both directions; unlinked pairs are missing."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._links: dict[frozenset[str], tuple[float, float]] = {
            frozenset((link.a, link.b)): (link.bw_Gbps * 1e9 / 8, link.latency_ms * 1e-3) for link in links
        }

    def bytes_per_second(self, one: str, other: str) -> float:
        """Bandwidth in each direction; 0 if they are not connected."""
        return self._links.get(frozenset((one, other)), (0.0, 0.0))[0]

    def latency_s(self, one: str, other: str) -> float:
        """Of the connection of two regions; 0 if there is none."""
        return self._links.get(frozenset((one, other)), (0.0, 0.0))[1]

    def transfer_s(self, homes: Collection[str], region: str, num_bytes: float) -> float:
        """Seconds to copy bytes to a region from the one of `homes` with the fastest link; infinite without links."""
        if region in homes:
            return 0.0
        bytes_per_second, latency_s = max(self._links.get(frozenset((home, region)), (0.0, 0.0)) for home in homes)
        return num_bytes / bytes_per_second + latency_s if bytes_per_second > 0 else math.inf
