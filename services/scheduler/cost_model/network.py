"""Computes transfer times over the links between regions."""

from __future__ import annotations

from collections.abc import Iterable

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

    def transfer_s(self, sources: Iterable[str], target: str, num_bytes: float) -> float | None:
        """Seconds to copy bytes to a region from the source with the fastest link; None if no source is linked."""
        bytes_per_second, latency_s = max(
            (self._links.get(frozenset((source, target)), (0.0, 0.0)) for source in sources), default=(0.0, 0.0)
        )
        return num_bytes / bytes_per_second + latency_s if bytes_per_second > 0 else None
