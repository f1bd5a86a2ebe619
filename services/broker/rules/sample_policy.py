"""Reads how a run treats its samples, with every default filled in. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import InvalidFieldError
from penstock.staleness.policy import StalenessPolicy
from penstock.staleness.registry import DEFAULT, POLICIES
from penstock.v1 import broker_pb2
from services.broker.dispatch.policies import DISPATCH_POLICIES
from services.broker.rules.limits import MAX_GROUP_SIZE, Limits

DEFAULT_RETAINED_STEPS = 64
MAX_RETAINED_STEPS = 1_024
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
    dispatch: str

    @property
    def dispatches_by_length(self) -> bool:
        """Whether the queue is also kept in the order of forecast lengths."""
        return self.dispatch not in ("fifo", "least_loaded")

    @classmethod
    def from_proto(cls, policy: broker_pb2.RunPolicy, limits: Limits) -> Policy:
        """Check and complete a request's policy; an unset one has every default. Raises InvalidFieldError."""
        stale = POLICIES.get(policy.stale) if policy.stale else DEFAULT
        if stale is None:
            raise _bad("stale", policy.stale, "a known StalePolicy")
        _require(
            "partial_groups",
            policy.partial_groups,
            policy.partial_groups in _PARTIAL_GROUP_POLICIES,
            "a known PartialGroupPolicy",
        )
        _require(
            "drops_zero_variance",
            policy.drops_zero_variance,
            limits.group_size > 1 or not policy.drops_zero_variance,
            "false with a group size of 1: one reward always equals itself",
        )
        most_extra = MAX_GROUP_SIZE - limits.group_size
        _require(
            "num_extra_samples",
            policy.num_extra_samples,
            policy.num_extra_samples <= most_extra,
            f"at most {most_extra}, so that a group has at most {MAX_GROUP_SIZE} samples",
        )
        _require(
            "num_retained_steps",
            policy.num_retained_steps,
            policy.num_retained_steps <= MAX_RETAINED_STEPS,
            f"at most {MAX_RETAINED_STEPS}",
        )
        _require(
            "dispatch",
            policy.dispatch[:80],
            not policy.dispatch or policy.dispatch in DISPATCH_NAMES,
            f"one of {', '.join(DISPATCH_NAMES)}",
        )
        return cls(
            stale=stale,
            partial_groups=policy.partial_groups or broker_pb2.PARTIAL_GROUP_POLICY_SHRINK,
            drops_zero_variance=policy.drops_zero_variance,
            num_extra_samples=policy.num_extra_samples,
            num_retained_steps=policy.num_retained_steps or DEFAULT_RETAINED_STEPS,
            dispatch=policy.dispatch or DEFAULT_DISPATCH,
        )

    def to_proto(self) -> broker_pb2.RunPolicy:
        """The policy as a message with every default filled in."""
        return broker_pb2.RunPolicy(
            stale=self.stale.number,
            partial_groups=self.partial_groups,
            drops_zero_variance=self.drops_zero_variance,
            num_extra_samples=self.num_extra_samples,
            num_retained_steps=self.num_retained_steps,
            dispatch=self.dispatch,
        )


def _require(field: str, value: object, is_good: bool, wanted: str) -> None:
    if not is_good:
        raise _bad(field, value, wanted)


def _bad(field: str, value: object, wanted: str) -> InvalidFieldError:
    return InvalidFieldError(f"policy.{field}: {value!r}; must be {wanted}", field=f"policy.{field}")
