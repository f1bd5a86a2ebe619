"""Counts steps whose groups' records are gone, so that a rewind behind them still balances the audit. Pure.

A step that is no longer retained, or that Redis lost and the trainer's step log restored, cannot be delivered again.
Only a tally of it remains: the number of samples it trained, by the columns of the audit. A rewind that
takes such a step back moves its samples from trained to dropped, with reason `abandoned_step`, and the run continues.
"""

from __future__ import annotations

from collections import Counter

from services.broker.records_pb2 import StepTally, TallyRow
from services.broker.state import batches, counters
from services.broker.state.run_state import RunState

ABANDONED_STEP = "abandoned_step"
MAX_TALLIES = 1_024
"""Number of steps no longer retained that a rewind may still go behind; about 100 bytes each."""

_Row = tuple[int, int, int]
"""Submission version, length bucket (tokens), staleness (versions)."""


def forget_step(state: RunState, version: int) -> None:
    """Forget a trained step's records and payload, keeping its tally; its ids are never accepted again."""
    num_groups, samples = 0, Counter[_Row]()
    for name in list(state.index.trained.get(version, ())):
        record = state.groups[name]
        num_groups += batches.num_groups(record)
        for (max_tokens, lag), count in counters.trained_rows(record).items():
            samples[record.submit_version, max_tokens, lag] += count
        state.retire(name)
    _add(state, version, num_groups, samples)
    state.run.forgotten_version = version
    for old in sorted(_forgotten(state))[:-MAX_TALLIES]:
        state.set_tally(old, None)


def note_lost_group(state: RunState, version: int, *, num_samples: int) -> None:
    """Count a group known only from the trainer's step log as submitted now and trained by that step."""
    submit_version = counters.row_version(state, state.run.policy_version)
    counters.count_submitted(state, version=submit_version, num_samples=num_samples)
    counters.count_trained(state, version=submit_version, num_tokens=0, staleness=0, num_samples=num_samples)
    _add(state, version, 1, Counter({(submit_version, 0, 0): num_samples}))


def oldest_reachable(state: RunState) -> int:
    """The oldest version to which the run can be rewound."""
    return min(_forgotten(state), default=state.run.forgotten_version + 1) - 1


def abandon_after(state: RunState, policy_version: int) -> int:
    """Drop the samples of later steps without a record, in a rewind; returns their number."""
    num_samples = 0
    for version in [version for version in state.tallies if version > policy_version]:
        for row in state.tallies[version].rows:
            counters.count_trained(
                state,
                version=row.submit_version,
                num_tokens=row.max_tokens,
                staleness=row.staleness,
                num_samples=-row.num_samples,
            )
            counters.count_dropped(
                state,
                version=row.submit_version,
                num_tokens=row.max_tokens,
                reason=ABANDONED_STEP,
                num_samples=row.num_samples,
            )
            num_samples += row.num_samples
        state.set_tally(version, None)
    if state.run.HasField("forgotten_version"):
        state.run.forgotten_version = min(state.run.forgotten_version, policy_version)
    return num_samples


def num_lost_samples(state: RunState, version: int) -> int:
    """Number of samples of a retained step that no longer have a record."""
    return sum(row.num_samples for row in state.tallies[version].rows) if version in state.tallies else 0


def _forgotten(state: RunState) -> list[int]:
    """Steps of which only a tally remains."""
    return [version for version in state.tallies if version <= state.run.forgotten_version]


def _add(state: RunState, version: int, num_groups: int, samples: Counter[_Row]) -> None:
    old = state.tallies.get(version, StepTally())
    total = samples + Counter(
        {(row.submit_version, row.max_tokens, row.staleness): row.num_samples for row in old.rows}
    )
    rows = [
        TallyRow(submit_version=submitted, max_tokens=max_tokens, staleness=lag, num_samples=count)
        for (submitted, max_tokens, lag), count in sorted(total.items())
    ]
    tally = StepTally(policy_version=version, num_groups=old.num_groups + num_groups, rows=rows)
    state.set_tally(version, tally)
