"""Ids of a run's spans, derived from the names of what they are about; and which groups are sampled.

A group's trace id is the beginning of a BLAKE2 digest, so its bits are as good as random, and the share that is sampled
is what a threshold on 56 of them lets pass: the rule of W3C's trace context, level 2, and of OpenTelemetry's
consistent probability sampling. Every process comes to the same decision; the broker keeps the one that it took.
"""

from __future__ import annotations

from hashlib import blake2b

from penstock.tracing.context import TraceContext

_RANDOM_BITS = 56


def group_context(run_id: str, group_id: str) -> TraceContext:
    """The root span of a group's life."""
    return _derived("group", run_id, group_id)


def sample_context(group: TraceContext, index: int, attempt: int) -> TraceContext:
    """The span of a sample's attempt, in the trace of its group."""
    derived = _derived("sample", f"{group.span_id:x}", str(index), str(attempt))
    return TraceContext(group.trace_id, derived.span_id, group.is_sampled)


def step_context(run_id: str, policy_version: int, history: int) -> TraceContext:
    """The span of the optimiser step that makes a version; a step taken again after a rewind has another history."""
    return _derived("step", run_id, str(policy_version), str(history))


def traceparent_of(run_id: str, group_id: str, ratio: float) -> str:
    """What is kept with a group that is sampled; empty for one that is not.

    Args:
        run_id: Its run.
        group_id: Its id.
        ratio: Share of groups that are sampled, 0 to 1.
    """
    context = group_context(run_id, group_id)
    is_sampled = context.trace_id & ((1 << _RANDOM_BITS) - 1) < ratio * (1 << _RANDOM_BITS)
    return context.traceparent if is_sampled else ""


def _derived(*names: str) -> TraceContext:
    digest = blake2b("\0".join(names).encode(), digest_size=24).digest()
    # 0 is not a valid id; the chance of it is negligible.
    return TraceContext(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1)
