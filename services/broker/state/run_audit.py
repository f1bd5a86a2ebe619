"""Audits a run: submitted = trained + dropped + in flight. Pure.

In flight is counted sample by sample from the records and never by subtraction, so that the equation can fail. With the
counters of the same moment (see `books`) it is checked for each submission version too, and the counters against the
totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from penstock.v1 import broker_pb2, types_pb2
from services.broker.state import batches
from services.broker.state.counters import SUBMITTED, TRAINED, Entry, length_bucket, row_version
from services.broker.state.run_state import RunState


def state_name(state: broker_pb2.SampleState.ValueType) -> str:
    """The state's name in lower case, for example "queued"."""
    return broker_pb2.SampleState.Name(state).removeprefix("SAMPLE_STATE_").lower()


def audit(state: RunState) -> broker_pb2.Audit:
    """The totals now, in samples of purpose TRAIN, every sample in flight counted one by one."""
    return _totals(state, Counter(sample_state for sample_state, _version, _num_tokens in _in_flight(state)))


def totals(state: RunState) -> broker_pb2.Audit:
    """The totals by the counts that the queues keep, for frequent callers: its time does not grow with the run."""
    counted = +state.index.num_samples
    del counted[broker_pb2.SAMPLE_STATE_DROPPED]
    return _totals(state, counted)


def _totals(state: RunState, counted: Counter[broker_pb2.SampleState.ValueType]) -> broker_pb2.Audit:
    run, sessions = state.run, _sessions(state)
    in_flight = sum(counted.values())
    by_staleness = {versions: count for versions, count in run.trained_by_staleness.items() if count}
    return broker_pb2.Audit(
        submitted=run.submitted,
        trained=run.trained,
        dropped=dict(run.dropped),
        in_flight=in_flight,
        in_flight_by_state={state_name(value): count for value, count in counted.items()},
        balanced=run.submitted == run.trained + sum(run.dropped.values()) + in_flight
        and (sessions is None or sessions.opened == sessions.put + sum(sessions.dropped.values()) + sessions.open),
        max_staleness_seen=max(by_staleness, default=0),
        policy_version=run.policy_version,
        trained_by_staleness=by_staleness,
        sessions=sessions,
    )


def _sessions(state: RunState) -> broker_pb2.SessionAudit | None:
    """Agents' sessions; None if there were none."""
    run = state.run
    if not run.sessions_opened and not state.sessions:
        return None
    return broker_pb2.SessionAudit(
        opened=run.sessions_opened, put=run.sessions_put, dropped=dict(run.sessions_dropped), open=len(state.sessions)
    )


def audit_rows(state: RunState, counts: Mapping[str, int]) -> broker_pb2.Audit:
    """The totals and the rows; `counts` are the audit's counters at the same commit as the state.

    A run older than the counters has no rows, and only its totals are checked.
    """
    books = audit(state)
    if not state.run.HasField("books_version"):
        return books
    rows, submitted = _rows(state, counts)
    books.rows.extend(rows)
    books.submitted_by_version.extend(
        broker_pb2.SubmittedRow(submit_version=version, submitted=count) for version, count in sorted(submitted.items())
    )
    books.balanced = books.balanced and _is_every_version_balanced(rows, submitted) and _is_sum(books)
    return books


def _rows(state: RunState, counts: Mapping[str, int]) -> tuple[list[broker_pb2.AuditRow], Counter[int]]:
    """Rows by version and length bucket, in that order, and samples submitted by version."""
    rows: dict[tuple[int, int], broker_pb2.AuditRow] = {}
    submitted: Counter[int] = Counter()

    def row(version: int, max_tokens: int) -> broker_pb2.AuditRow:
        key = (version, max_tokens)
        return rows.setdefault(key, broker_pb2.AuditRow(submit_version=version, max_tokens=max_tokens))

    for name, count in counts.items():
        entry = Entry.parse(name)
        if count <= 0:
            # Only a fault makes a counter negative, and leaving it out makes the sums fail.
            continue
        if entry.kind == SUBMITTED:
            submitted[entry.version] += count
        elif entry.kind == TRAINED:
            row(entry.version, entry.max_tokens).trained += count
        else:
            row(entry.version, entry.max_tokens).dropped[entry.reason] += count
    for _sample_state, version, num_tokens in _in_flight(state):
        row(row_version(state, version), length_bucket(num_tokens)).in_flight += 1
    return [rows[key] for key in sorted(rows)], submitted


def _is_every_version_balanced(rows: Sequence[broker_pb2.AuditRow], submitted: Counter[int]) -> bool:
    accounted: Counter[int] = Counter()
    for row in rows:
        accounted[row.submit_version] += row.trained + sum(row.dropped.values()) + row.in_flight
    return accounted == submitted


def _is_sum(books: broker_pb2.Audit) -> bool:
    """Whether the rows add up to the totals."""
    dropped: Counter[str] = Counter()
    for row in books.rows:
        dropped.update(row.dropped)
    return (
        sum(row.submitted for row in books.submitted_by_version) == books.submitted
        and sum(row.trained for row in books.rows) == books.trained
        and dropped == Counter(books.dropped)
    )


def _in_flight(state: RunState) -> Iterator[tuple[broker_pb2.SampleState.ValueType, int, int]]:
    """State, submission version and tokens of every training sample that is neither trained nor dropped."""
    for name in state.index.live:
        record = state.groups[name]
        if record.purpose == types_pb2.PURPOSE_TRAIN:
            for sample_state, num_tokens in batches.in_flight(record):
                yield sample_state, record.submit_version, num_tokens
