"""Reads how a run treats its samples, with every default filled in. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import require
from penstock.staleness.policy import StalenessPolicy
from penstock.staleness.registry import DEFAULT, POLICIES
from penstock.v1 import broker_pb2
from services.broker.dispatch.policies import DISPATCH_POLICIES
from services.broker.rules.limits import MAX_GROUP_SIZE, Limits

DEFAULT_RETAINED_STEPS = 64
MAX_RETAINED_STEPS = 1_024
DEFAULT_RETAINED_BYTES = 4 * 1024**3
MAX_RETAINED_GROUPS = 262_144
"""Groups of trained steps whose records a broker loads when it starts; what was put together counts as one."""
MIN_RETAINED_BYTES, MAX_RETAINED_BYTES = 1024**2, 2**50
MAX_TOKEN_SHARDS = 1_024
MAX_REFERENCE_TOKENS = 128 * 1024
"""Completion tokens of a sample with a reference's log-probs: they come in one message, 512 KiB."""
DEFAULT_DISPATCH = "auto"
DISPATCH_NAMES = tuple(DISPATCH_POLICIES)

_PARTIAL_GROUP_POLICIES = frozenset(broker_pb2.PartialGroupPolicy.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """RunPolicy as plain values; see the proto for their meaning."""

    stale: StalenessPolicy
    partial_groups: broker_pb2.PartialGroupPolicy.ValueType
    drops_zero_variance: bool
    num_extra_samples: int
    num_retained_steps: int
    max_retained_bytes: int
    dispatch: str
    token_shards: int
    """At least 2; 0 if tokens are with the run."""
    needs_reference_logprobs: bool
    has_environment: bool
    """Whether last chunks may bring scores."""

    @property
    def max_trained_bytes(self) -> int:
        """Bound on what trained steps take in the store."""
        return self.max_retained_bytes // 2

    @property
    def max_live_bytes(self) -> int:
        """Bound on what waits or is under way, beyond which only the step being filled goes on."""
        return self.max_retained_bytes // 2

    @property
    def dispatches_by_length(self) -> bool:
        """Whether the queue is also kept in the order of forecast lengths."""
        return self.dispatch not in ("fifo", "least_loaded")

    @classmethod
    def from_proto(cls, policy: broker_pb2.RunPolicy, limits: Limits) -> Policy:
        """Check and complete a request's policy; an unset one has every default. Raises InvalidFieldError."""
        require(not policy.stale or policy.stale in POLICIES, "policy.stale", policy.stale, "a known StalePolicy")
        require(
            policy.partial_groups in _PARTIAL_GROUP_POLICIES,
            "policy.partial_groups",
            policy.partial_groups,
            "a known PartialGroupPolicy",
        )
        require(
            limits.group_size > 1 or not policy.drops_zero_variance,
            "policy.drops_zero_variance",
            policy.drops_zero_variance,
            "false with a group size of 1: one reward always equals itself",
        )
        most_extra = MAX_GROUP_SIZE - limits.group_size
        require(
            policy.num_extra_samples <= most_extra,
            "policy.num_extra_samples",
            policy.num_extra_samples,
            f"at most {most_extra}, so that a group has at most {MAX_GROUP_SIZE} samples",
        )
        retained, dispatch = policy.num_retained_steps, policy.dispatch
        require(retained <= MAX_RETAINED_STEPS, "policy.num_retained_steps", retained, f"at most {MAX_RETAINED_STEPS}")
        num_bytes = policy.max_retained_bytes
        require(
            not num_bytes or MIN_RETAINED_BYTES <= num_bytes <= MAX_RETAINED_BYTES,
            "policy.max_retained_bytes",
            num_bytes,
            f"{MIN_RETAINED_BYTES} to {MAX_RETAINED_BYTES}, or 0 for {DEFAULT_RETAINED_BYTES}",
        )
        shards = policy.token_shards
        require(shards <= MAX_TOKEN_SHARDS, "policy.token_shards", shards, f"at most {MAX_TOKEN_SHARDS}")
        require(
            limits.max_completion_tokens <= MAX_REFERENCE_TOKENS or not policy.needs_reference_logprobs,
            "policy.needs_reference_logprobs",
            policy.needs_reference_logprobs,
            f"false with max_completion_tokens {limits.max_completion_tokens}, above {MAX_REFERENCE_TOKENS}",
        )
        is_known = not dispatch or dispatch in DISPATCH_NAMES
        require(is_known, "policy.dispatch", dispatch[:80], f"one of {', '.join(DISPATCH_NAMES)}")
        return cls(
            stale=POLICIES.get(policy.stale, DEFAULT),
            partial_groups=policy.partial_groups or broker_pb2.PARTIAL_GROUP_POLICY_SHRINK,
            drops_zero_variance=policy.drops_zero_variance,
            num_extra_samples=policy.num_extra_samples,
            num_retained_steps=retained or DEFAULT_RETAINED_STEPS,
            max_retained_bytes=num_bytes or DEFAULT_RETAINED_BYTES,
            dispatch=dispatch or DEFAULT_DISPATCH,
            token_shards=shards if shards > 1 else 0,
            needs_reference_logprobs=policy.needs_reference_logprobs,
            has_environment=policy.has_environment,
        )

    def to_proto(self) -> broker_pb2.RunPolicy:
        """The policy as a message with every default filled in."""
        return broker_pb2.RunPolicy(
            stale=self.stale.number,
            partial_groups=self.partial_groups,
            drops_zero_variance=self.drops_zero_variance,
            num_extra_samples=self.num_extra_samples,
            num_retained_steps=self.num_retained_steps,
            max_retained_bytes=self.max_retained_bytes,
            dispatch=self.dispatch,
            token_shards=self.token_shards or 1,
            needs_reference_logprobs=self.needs_reference_logprobs,
            has_environment=self.has_environment,
        )
