"""What fleets of GPUs need, by measured costs of a unit of work. Pure: nothing is measured here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.heartbeat_interval import BEAT_INTERVAL_S, LONGEST_ASKED_S
from penstock.v1 import types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from services.broker.rules.flush_pacing import DEFAULT_LONGEST_S, SHORTEST_S
from services.broker.rules.heartbeat_pacing import LEASE_SHARE

GPUS = (64, 256, 1_024, 8_192)
GROUP_SIZE = 8
LEASE_S = 15.0
"""The trainer's default."""
LONGEST_BEAT_S = min(LONGEST_ASKED_S, LEASE_SHARE * LEASE_S)
BYTES_PER_TOKEN = 8
"""A token id and a log-prob, as the trainer gets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What is assumed of a fleet, not measured."""

    tokens_per_gpu_s: float = 2_000.0
    samples_per_gpu: int = 256
    mean_tokens: float = 4_000.0
    """Of a completion."""
    flush_s: float = SHORTEST_S
    longest_flush_s: float = DEFAULT_LONGEST_S
    most_used: float = 0.7
    """Share of a core, of a broker or of Redis, that is planned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured CPU time in us, and bytes between brokers and Redis."""

    us_per_chunk: float
    us_per_token: float
    us_per_request: float
    us_per_lease: float
    us_per_group: float
    """Its samples' ends, scores, delivery and acknowledgement."""
    us_per_heartbeat: float
    """Of a generator, whatever it holds."""
    us_per_lease_kept: float
    """Besides, for each sample that a heartbeat names."""
    redis_us_per_chunk: float
    redis_us_per_token: float
    redis_bytes_per_chunk: float
    """Read and sent."""
    redis_bytes_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a fleet does in a second."""

    tokens: float
    chunks: float
    requests: float
    samples: float
    """That end, and that are leased."""
    beats: float
    kept: float
    """Leases that heartbeats name."""

    @classmethod
    def of(cls, num_gpus: int, assumed: Assumptions, *, flush_s: float, beat_s: float) -> Rates:
        """Of that many GPUs, each with a generator of its own, at these intervals."""
        tokens = num_gpus * assumed.tokens_per_gpu_s
        return cls(
            tokens=tokens,
            chunks=min(tokens, num_gpus * assumed.samples_per_gpu / flush_s),
            requests=num_gpus / flush_s,
            samples=tokens / assumed.mean_tokens,
            beats=num_gpus / beat_s,
            kept=num_gpus * assumed.samples_per_gpu / beat_s,
        )

    def shard_cores(self, costs: Costs) -> float:
        """Cores for tokens, which several brokers share."""
        us = self.chunks * costs.us_per_chunk + self.tokens * costs.us_per_token + self.requests * costs.us_per_request
        return us / 1e6

    def run_cores(self, costs: Costs) -> float:
        """Cores for leases, heartbeats and groups, which one broker decides: the owner of the run's own record."""
        us = self.samples * (costs.us_per_lease + costs.us_per_group / GROUP_SIZE)
        return (us + self.beats * costs.us_per_heartbeat + self.kept * costs.us_per_lease_kept) / 1e6

    def redis_cores(self, costs: Costs) -> float:
        """Cores of Redis for tokens."""
        return (self.chunks * costs.redis_us_per_chunk + self.tokens * costs.redis_us_per_token) / 1e6

    def bytes_per_second(self, costs: Costs) -> float:
        """What generators send, what brokers exchange with Redis, and what the trainer gets."""
        chunk = chunk_bytes(round(self.tokens / self.chunks))
        redis = self.chunks * costs.redis_bytes_per_chunk + self.tokens * costs.redis_bytes_per_token
        return self.chunks * chunk + redis + self.tokens * BYTES_PER_TOKEN


def needs(num_gpus: int, assumed: Assumptions, costs: Costs) -> dict[str, Any]:
    """Of one fleet: at the default intervals, and `eased` at the longest that a busy broker asks for."""
    rates = Rates.of(num_gpus, assumed, flush_s=assumed.flush_s, beat_s=BEAT_INTERVAL_S)
    eased = Rates.of(num_gpus, assumed, flush_s=assumed.longest_flush_s, beat_s=LONGEST_BEAT_S)
    run_cores, run_cores_eased = rates.run_cores(costs), eased.run_cores(costs)
    return {
        "tokens_per_second": rates.tokens,
        "broker_cores": _cores(rates, assumed, costs),
        "broker_cores_eased": _cores(eased, assumed, costs),
        "run_owner_cores": run_cores,
        "run_owner_cores_eased": run_cores_eased,
        "run_owner_keeps_up": run_cores_eased <= 1.0,
        "redis_nodes": math.ceil(max(1.0, rates.redis_cores(costs) / assumed.most_used)),
        "redis_nodes_eased": math.ceil(max(1.0, eased.redis_cores(costs) / assumed.most_used)),
        "mb_per_s": rates.bytes_per_second(costs) / 1e6,
        "mb_per_s_eased": eased.bytes_per_second(costs) / 1e6,
    }


def all_needs(gpus: tuple[int, ...], assumed: Assumptions, costs: Costs) -> dict[str, Any]:
    """Of every fleet, and what is assumed."""
    return {
        "needs": {str(number): needs(number, assumed, costs) for number in gpus},
        "assumptions": asdict(assumed)
        | {"group_size": GROUP_SIZE, "beat_s": BEAT_INTERVAL_S, "longest_beat_s": LONGEST_BEAT_S},
        "costs": asdict(costs),
    }


def chunk_bytes(num_tokens: int) -> int:
    """A chunk's size on the wire."""
    chunk = types_pb2.TokenChunk(
        key=types_pb2.SampleKey(group_id="prompt-1234567", sample_index=3),
        lease_id="1234567.3.0_1.0123456789abcdef",
        offset=2_000,
        token_ids=int32_bytes(np.zeros(num_tokens, np.int32)),
        logprobs=float32_bytes(np.zeros(num_tokens, np.float32)),
        policy_versions=encode_versions([7] * num_tokens),
    )
    return chunk.ByteSize()


def _cores(rates: Rates, assumed: Assumptions, costs: Costs) -> int:
    return math.ceil((rates.shard_cores(costs) + rates.run_cores(costs)) / assumed.most_used)
