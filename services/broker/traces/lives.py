"""Decides which ended groups and samples of a run are traced, and records their spans.

Those that were sampled when they were submitted are; and, up to a budget, those that failed or were slow: a grader that
fails every sample must not fill the disk.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from penstock import tracing
from penstock.tracing.tail import SlowOnes, TailBudget
from services.broker.records.ended import Ended
from services.broker.records_pb2 import SampleRecord
from services.broker.traces.spans import Life, group_spans, kept_indices, sample_spans

_log = structlog.get_logger()


class Lives:
    """The traced lives of one run, in one process."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._slow = SlowOnes()
        self._budget = TailBudget()

    def record(self, ended: Iterable[Ended], *, history: int, now_s: float) -> None:
        """Record what ended with a commit, by the run's clock, of a run with that history."""
        self._budget.earn(now_s)
        for each in ended:
            self._record(each, history=history, now_s=now_s)

    def _record(self, ended: Ended, *, history: int, now_s: float) -> None:
        group = ended.group
        life = Life(run_id=self._run_id, group=group, end_s=now_s, reason=ended.reason, history=history)
        is_sampled = bool(group.traceparent) and life.context.is_sampled
        if ended.sample is not None:
            _log.info(
                "sample failed",
                run_id=self._run_id,
                group_id=group.group_id,
                sample_index=ended.index,
                attempt=ended.sample.attempt,
                reason=ended.reason,
            )
            if is_sampled or self._budget.affords(1):
                for span in sample_spans(life, ended.sample, ended.index, is_failed=True):
                    tracing.record(span)
            return
        slow = [index for index, sample in enumerate(group.samples) if self._is_slow(sample)]
        kept = kept_indices(group) if group.traceparent or ended.is_failure else slow
        if is_sampled or (kept and self._budget.affords(len(kept))):
            for span in group_spans(life, kept, is_failed=ended.is_failure):
                tracing.record(span)

    def _is_slow(self, sample: SampleRecord) -> bool:
        """Whether a sample took unusually long from its first lease to its score."""
        first_s, last_s = sample.first_lease_s, sample.score_s or sample.finish_s
        return bool(first_s) and last_s > first_s and self._slow.note(last_s - first_s)
