"""Replaces the stored chunks of delivered samples by compact ones. Pure operations on a RunState.

Promise: only what no longer grows is replaced: a sample that was restarted since it was read keeps what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.v1 import broker_pb2
from services.broker.records.store import SampleId
from services.broker.state import batches
from services.broker.state.run_state import FORMAT, RunState

_WHOLE_STATES = frozenset(
    (broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DELIVERED, broker_pb2.SAMPLE_STATE_TRAINED)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactSample:
    """A sample as it is kept from now on."""

    sample: SampleId
    attempt: int
    """The attempt that was read."""
    payload: bytes
    """In place of its chunks."""
    reference: bytes = b""
    """The element of its reference's log-probs, which stays with the run; empty without."""


def replace_chunks(state: RunState, samples: Sequence[CompactSample]) -> int:
    """Replace the chunks of those samples that are as they were read; returns their number.

    A token shard has replaced those of its samples already: only their records change.
    """
    num_replaced = 0
    for compact in samples:
        group_id, index = compact.sample
        group = state.groups.get(group_id)
        if group is None or index >= len(group.samples):
            continue
        sample = group.samples[index]
        if sample.attempt != compact.attempt or sample.state not in _WHOLE_STATES:
            continue
        state.grow(group_id)
        record = state.groups.opened(group_id)
        kept = record.samples[index]
        num_bytes = len(compact.payload) + len(compact.reference)
        state.index.grow(group_id, num_bytes - batches.sample_bytes(kept))
        record.is_compact, kept.stored_bytes = True, num_bytes
        if record.HasField("trained_version"):
            record.stored_bytes = state.index.stored_bytes(group_id)
        if not group.token_shard:
            state.clear(compact.sample)
            state.append(compact.sample, compact.payload)
            if compact.reference:
                state.append(compact.sample, compact.reference)
        state.run.format = FORMAT
        num_replaced += 1
    return num_replaced
