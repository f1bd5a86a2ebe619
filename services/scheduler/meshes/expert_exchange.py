"""Computes what processes exchange that divide the experts of each layer: tokens to their experts, and answers back.

Routing is taken to be even. In each layer all wait for it, so that no computation hides it. Source: GShard
(arXiv 2006.16668), section 3.2, as in the trainer; bytes are `penstock.model.training_traffic`'s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

from services.scheduler.cost_model.network import Network
from services.scheduler.meshes.islands import Part, cut, size_of
from services.scheduler.problem.problem import GpuType


def exchange_s(
    gpu_types: Mapping[str, GpuType], network: Network, parts: Sequence[Part], *, num_expert_shards: int, sent: float
) -> float:
    """Time until all of an island have sent as much, an equal part to each of the neighbours with the other experts.

    Args:
        gpu_types: Of the problem.
        network: Its links.
        parts: The island's processes, in the order of their ranks.
        num_expert_shards: Neighbours that divide the experts, a divisor of the island.
        sent: Bytes of each process in all, of which it keeps the part for its own experts.
    """
    seconds = [0.0]
    each = sent / num_expert_shards
    leaving, crossing = Counter[str](), Counter[tuple[str, str]]()
    for group in cut(parts, (num_expert_shards,) * (size_of(parts) // num_expert_shards)):
        regions = Counter[str]()
        for part in group:
            seconds.append(each * (part.gpus - 1) / (gpu_types[part.node.gpu].ar_bus_GBps * 1e9))
            # Whole units: processes here times those elsewhere.
            leaving[part.machine] += part.gpus * (num_expert_shards - part.gpus)
            regions[part.node.region] += part.gpus
        for one, other in combinations(sorted(regions), 2):
            crossing[one, other] += regions[one] * regions[other]
    cards = {part.machine: part.node.nic_Gbps * 1e9 / 8 for part in parts}
    seconds += [each * count / cards[machine] for machine, count in leaving.items()]
    for (one, other), count in crossing.items():
        rate = network.bytes_per_second(one, other)
        seconds.append(each * count / rate if rate else math.inf)
    return max(seconds)
