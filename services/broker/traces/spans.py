"""The spans of a group's life, from its record: pure.

    rl.group                          submitted ... trained, or dropped
      rl.sample                       one for each attempt at a sample
        rl.sample.queue               submitted ... first lease; not of a restarted sample, whose record has no begin
        rl.sample.generate            here only if the generators wrote none: the last lease ... the last chunk
        rl.sample.score               the last chunk ... the score accepted
        rl.sample.reference           the score accepted ... a scorer's log-probs accepted, where there is a scorer
        rl.sample.wait_for_training   the score, or those log-probs, accepted ... trained

Times are those of the run's clock, the store's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from penstock.tracing import Span, TraceContext, group_context, read_traceparent, sample_context, step_context
from penstock.tracing.recording import Attributes
from penstock.v1 import broker_pb2, types_pb2
from services.broker.records_pb2 import GroupRecord, SampleRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A group, or one sample of it that was given up, whose life has ended."""

    run_id: str
    group: GroupRecord
    end_s: float
    reason: str
    """Why it was dropped; empty if it was trained."""
    history: int
    """Of the run."""

    @property
    def context(self) -> TraceContext:
        """Of the group's span."""
        return read_traceparent(self.group.traceparent) or group_context(self.run_id, self.group.group_id)


def group_spans(life: Life, indices: Collection[int], *, is_failed: bool) -> Iterator[Span]:
    """The group's span, and those of the samples at `indices`."""
    group, links = life.group, []
    attributes: Attributes = {
        "rl.group.id": group.group_id,
        "rl.group.size": len(group.samples),
        "rl.purpose": types_pb2.Purpose.Name(group.purpose).removeprefix("PURPOSE_").lower(),
    }
    if not life.reason:
        attributes = {**attributes, "rl.policy.version": group.trained_version}
        links.append(step_context(life.run_id, group.trained_version, life.history))
    else:
        attributes = {**attributes, "rl.drop.reason": life.reason}
    yield Span(
        name="rl.group",
        run_id=life.run_id,
        start_s=group.submit_s,
        end_s=life.end_s,
        context=life.context,
        attributes=attributes,
        links=links,
        error=life.reason if is_failed else "",
    )
    for index in indices:
        yield from sample_spans(life, group.samples[index], index, is_failed=is_failed)


def sample_spans(life: Life, sample: SampleRecord, index: int, *, is_failed: bool) -> Iterator[Span]:
    """The spans of one sample's attempt."""
    group, root = life.group, life.context
    context = sample_context(root, index, sample.attempt)
    is_first = sample.attempt == 0
    yield Span(
        name="rl.sample",
        run_id=life.run_id,
        start_s=group.submit_s if is_first else sample.first_lease_s or life.end_s,
        end_s=life.end_s,
        context=context,
        parent=root,
        attributes=_attributes(group, sample, index),
        error=life.reason if is_failed else "",
    )
    is_generated_apart = bool(group.traceparent) and root.is_sampled
    parts: tuple[tuple[str, float, float, Attributes], ...] = (
        ("queue", group.submit_s if is_first else 0.0, sample.first_lease_s, {}),
        ("generate", 0.0 if is_generated_apart else sample.lease_s, sample.finish_s, _of(sample.generator_id)),
        # The record names its last worker, which for one with log-probs was the scorer.
        ("score", sample.finish_s, sample.score_s, {} if sample.reference_s else _of(sample.worker_id)),
        ("reference", sample.score_s, sample.reference_s, _of(sample.worker_id)),
        ("wait_for_training", sample.reference_s or sample.score_s, 0.0 if life.reason else life.end_s, {}),
    )
    key = f"{group.group_id}/{index}"
    for name, start_s, end_s, attributes in parts:
        if start_s and end_s >= start_s:
            yield Span(
                name=f"rl.sample.{name}",
                run_id=life.run_id,
                start_s=start_s,
                end_s=end_s,
                parent=context,
                attributes={"rl.sample.key": key, **attributes},
            )


def kept_indices(group: GroupRecord) -> list[int]:
    """The samples of a group that were not dropped."""
    dropped = broker_pb2.SAMPLE_STATE_DROPPED
    return [index for index, sample in enumerate(group.samples) if sample.state != dropped]


def _attributes(group: GroupRecord, sample: SampleRecord, index: int) -> Attributes:
    found: dict[str, str | int | float | bool] = {
        "rl.sample.key": f"{group.group_id}/{index}",
        "rl.sample.attempt": sample.attempt,
        "rl.sample.leases": sample.num_leases,
        "rl.sample.tokens": sample.num_tokens,
        "rl.generator.id": sample.generator_id,
    }
    if sample.HasField("min_version"):
        found |= {"rl.policy.min_version": sample.min_version, "rl.policy.max_version": sample.max_version}
    if sample.score.HasField("value"):
        found["rl.score"] = sample.score.value
    return found


def _of(worker_id: str) -> Attributes:
    return {"rl.worker.id": worker_id} if worker_id else {}
