"""Reads the numbers that bound a run, with every default filled in. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from penstock.errors import InvalidFieldError, require
from penstock.network.rpc import MAX_MESSAGE_BYTES
from penstock.stall_limits import SilenceLimit, silence_limit
from penstock.v1 import broker_pb2
from penstock.wire.pieces import MAX_GROUP_TOKENS
from penstock.wire.routes import RoutingShape

DEFAULT_GENERATION_LEASE_S = 30.0
DEFAULT_SCORING_LEASE_S = 60.0
DEFAULT_MAX_LEASES = 8
LEASE_SECRET_BYTES = 8
"""Random characters of a lease id: a request names 4,096 leases, so fewer could be guessed."""
MIN_QUEUED_GROUPS = 64
MIN_LEASE_S, MAX_LEASE_S = 0.1, 3600.0
MAX_SILENT_LIVES = 20
"""Lease durations after which, at the earliest, a lease without new tokens is no longer renewed."""
MAX_TOKEN_SILENCE_S = 7 * 24 * 3600.0

MAX_GROUPS_PER_STEP = 65_536
MAX_GROUP_SIZE = 1_024
MAX_STALENESS = 1_024
MAX_COMPLETION_TOKENS = 1 << 20
MAX_ID_BYTES = 240
"""Bytes of a group id as UTF-8."""
STEP_IDS_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""Bytes of a message available for the groups of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """RunLimits as plain numbers; see the proto for their meaning."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    max_queued_groups: int
    max_completion_tokens: int
    generation_lease_s: float
    scoring_lease_s: float
    max_leases_per_sample: int
    token_silence_s: float | None
    """None derives it from the generator's speed."""
    routing: RoutingShape | None = None
    """The form of the routes that training samples come with; None for none."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the routes that come with a token; 0 without."""
        return 0 if self.routing is None else self.routing.row_bytes

    @classmethod
    def from_proto(cls, limits: broker_pb2.RunLimits) -> Limits:
        """Check and complete a request's limits. Raises InvalidFieldError."""
        _check_range("groups_per_step", limits.groups_per_step, 1, MAX_GROUPS_PER_STEP)
        _check_range("group_size", limits.group_size, 1, MAX_GROUP_SIZE)
        _check_range("max_staleness", limits.max_staleness, 0, MAX_STALENESS)
        _check_range("max_completion_tokens", limits.max_completion_tokens, 1, MAX_COMPLETION_TOKENS)
        _check_step_ids(limits)
        _check_group_tokens(limits)
        return cls(
            groups_per_step=limits.groups_per_step,
            group_size=limits.group_size,
            max_staleness=limits.max_staleness,
            max_queued_groups=limits.max_queued_groups or max(MIN_QUEUED_GROUPS, 4 * limits.groups_per_step),
            max_completion_tokens=limits.max_completion_tokens,
            generation_lease_s=_lease_s(limits, "generation_lease", DEFAULT_GENERATION_LEASE_S),
            scoring_lease_s=_lease_s(limits, "scoring_lease", DEFAULT_SCORING_LEASE_S),
            max_leases_per_sample=limits.max_leases_per_sample or DEFAULT_MAX_LEASES,
            token_silence_s=_duration_s(limits, "token_silence", MAX_TOKEN_SILENCE_S),
            routing=routing_of(limits),
        )

    def to_proto(self) -> broker_pb2.RunLimits:
        """The limits as a message with every default filled in."""
        stated = broker_pb2.RunLimits(
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            max_staleness=self.max_staleness,
            max_queued_groups=self.max_queued_groups,
            max_completion_tokens=self.max_completion_tokens,
            generation_lease=duration(self.generation_lease_s),
            scoring_lease=duration(self.scoring_lease_s),
            max_leases_per_sample=self.max_leases_per_sample,
        )
        if self.token_silence_s is not None:
            stated.token_silence.CopyFrom(duration(self.token_silence_s))
        if self.routing is not None:
            stated.routing.CopyFrom(self.routing.to_proto())
        return stated

    def token_silence(self, generator_id: str, tokens_per_second: float | None) -> SilenceLimit:
        """How long a lease lasts without a token, given the speed of its generator's samples."""
        return silence_limit(
            setting="limits.token_silence (trainer.max_lease_silence_s)",
            configured_s=self.token_silence_s,
            least_s=MAX_SILENT_LIVES * self.generation_lease_s,
            max_tokens=self.max_completion_tokens,
            speeds={} if tokens_per_second is None else {generator_id: tokens_per_second},
        )


def _check_range(field: str, value: float, least: float, most: float, unit: str = "") -> None:
    require(least <= value <= most, f"limits.{field}", value, f"from {least} to {most}{unit}")


def _check_step_ids(limits: broker_pb2.RunLimits) -> None:
    """A step must fit in an acknowledgement, and in the step log with a mask of the samples trained on."""
    group_bytes = MAX_ID_BYTES + math.ceil(limits.group_size / 8) + 6
    most = STEP_IDS_BYTES // group_bytes
    if limits.groups_per_step > most:
        raise InvalidFieldError(
            f"limits.groups_per_step: {limits.groups_per_step} groups of {limits.group_size} samples cannot be "
            f"acknowledged in one message; at most {most}",
            field="limits.groups_per_step",
        )


def _check_group_tokens(limits: broker_pb2.RunLimits) -> None:
    """Sampled groups must be deliverable: see `penstock.wire.pieces`."""
    num_tokens, routing = limits.group_size * limits.max_completion_tokens, routing_of(limits)
    most = MAX_GROUP_TOKENS if routing is None else routing.max_group_tokens
    if num_tokens > most:
        what = "" if routing is None else f" with routes of {routing.row_bytes} bytes a token"
        raise InvalidFieldError(
            f"limits.group_size: {limits.group_size} samples of {limits.max_completion_tokens} tokens are {num_tokens} "
            f"tokens a group; at most {most} can be delivered{what}: lower it, or max_completion_tokens",
            field="limits.group_size",
        )


def routing_of(limits: broker_pb2.RunLimits) -> RoutingShape | None:
    """The form of a run's routes; None if it has none. Raises InvalidFieldError."""
    return RoutingShape.from_proto(limits.routing, "limits.routing") if limits.HasField("routing") else None


def _lease_s(limits: broker_pb2.RunLimits, field: str, default_s: float) -> float:
    seconds = _duration_s(limits, field, MAX_LEASE_S)
    return default_s if seconds is None else seconds


def _duration_s(limits: broker_pb2.RunLimits, field: str, most_s: float) -> float | None:
    """A duration within its bounds, seconds; None if unset. Raises InvalidFieldError."""
    if not limits.HasField(field):  # type: ignore[arg-type]
        return None
    duration: Duration = getattr(limits, field)
    seconds = duration.seconds + duration.nanos / 1e9
    _check_range(field, seconds, MIN_LEASE_S, most_s, " s")
    return seconds


def duration(seconds: float) -> Duration:
    """Seconds as a message."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
