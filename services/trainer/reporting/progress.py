"""Holds a run's progress: what a checkpoint stores besides the weights.

Promises:

- `policy_version` is that of the weights in memory; it advances with the optimiser step, `acked_version` with the
  broker's receipt. A crash between the two is healed by re-opening the run with the step log.
- `outstanding` names every training group that the broker may hold: submitted or about to be, and neither trained nor
  dropped by this trainer. Submitting is idempotent, so a resumed run submits them again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter

from penstock.v1 import broker_pb2
from penstock.wire.codec import index_mask
from services.trainer.checkpoints.checkpoint import CheckpointFormatError, ResumeState
from services.trainer.reporting.overlap import OverlapTotals

MAX_LOGGED_STEPS = 64
"""Steps whose groups are remembered: more than a broker's store can lose between two writes to disk."""
MAX_SAMPLE_INDEX = 1_023
"""The largest index that the broker assigns to a sample of a prompt."""
MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Limit of the step log in one OpenRun, sent every few seconds: a message holds 16 MiB, the largest step included."""
_EXTRA_KEY = "progress"


Mask = Annotated[bytes, BeforeValidator(bytes.fromhex), PlainSerializer(lambda mask: mask.hex())]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """The groups of one optimiser step."""

    policy_version: int
    group_ids: tuple[str, ...]
    trained_samples: tuple[Mask, ...] = ()
    """A mask of the samples trained on for each group (`index_mask`); none in older checkpoints."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """Mutable on purpose: the run's loop is its only writer."""

    instance_id: str = ""
    """Which run of this id it is; empty in runs from before there were instances."""
    epoch: int = 0
    """The newest epoch known here under which a trainer took over the run."""
    history: int = 0
    """The run's history counter, as returned by the broker when this trainer took over the run."""
    policy_version: int = 0
    acked_version: int = 0
    position: int = 0
    """Training prompts read from the data so far."""
    outstanding: Annotated[dict[str, None], BeforeValidator(dict.fromkeys), PlainSerializer(list)] = field(
        default_factory=dict
    )
    """Group ids, oldest first."""
    step_log: Annotated[deque[LoggedStep], Field(alias="ledger")] = field(
        default_factory=lambda: deque(maxlen=MAX_LOGGED_STEPS)
    )
    num_trained_groups: int = 0
    num_dropped_groups: int = 0
    num_samples: int = 0
    """Samples trained on."""
    num_response_tokens: int = 0
    """Completion tokens trained on."""
    max_staleness_seen: int = 0
    wall_s: float = 0.0
    """Seconds of earlier processes of this run, up to their last checkpoint."""
    overlap: OverlapTotals = field(default_factory=OverlapTotals)
    """The training phase of earlier processes, likewise."""

    def record_step(self, groups: Mapping[str, Iterable[int]]) -> None:
        """Record an optimiser step on these samples: their indices by group id."""
        self.policy_version += 1
        step = LoggedStep(
            policy_version=self.policy_version,
            group_ids=tuple(groups),
            trained_samples=tuple(_mask(indices) for indices in groups.values()),
        )
        self.step_log.append(step)
        self.num_trained_groups += len(groups)
        for group_id in groups:
            self.outstanding.pop(group_id, None)

    def step_records(self, *, max_bytes: int = MAX_RECORD_BYTES) -> list[broker_pb2.StepRecord]:
        """The end of the step log for OpenRun, newest last: as many steps as fit, and always the newest one."""
        records: deque[broker_pb2.StepRecord] = deque()
        for step in reversed(self.step_log):
            record = broker_pb2.StepRecord(
                policy_version=step.policy_version, group_ids=step.group_ids, trained_samples=step.trained_samples
            )
            max_bytes -= record.ByteSize()
            if records and max_bytes < 0:
                break
            records.appendleft(record)
        return list(records)

    def to_resume_state(self, *, wall_s: float, overlap: OverlapTotals) -> ResumeState:
        """The content of a checkpoint taken now."""
        now = replace(self, wall_s=wall_s, overlap=overlap)
        document = _DOCUMENT.dump_json(now, by_alias=True, exclude=_FROM_ELSEWHERE)
        return ResumeState(
            num_steps=self.policy_version, data_position=self.position, extra={_EXTRA_KEY: document.decode()}
        )

    @classmethod
    def from_resume_state(cls, state: ResumeState) -> Progress:
        """Where the checkpoint was taken; raises CheckpointFormatError."""
        try:
            document = json.loads(state.extra[_EXTRA_KEY])
            absent = _DOCUMENT.dump_python(cls(), by_alias=True, exclude=_OPTIONAL).keys() - document.keys()
            if absent:
                raise ValueError(f"it lacks {', '.join(sorted(absent))}")
            progress = _DOCUMENT.validate_python(document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointFormatError(f"the checkpoint's progress cannot be read: {error!r}") from error
        return replace(
            progress,
            policy_version=state.num_steps,
            acked_version=state.num_steps,
            position=state.data_position,
            step_log=deque(progress.step_log, maxlen=MAX_LOGGED_STEPS),
        )


_DOCUMENT = TypeAdapter(Progress)
_FROM_ELSEWHERE = {"policy_version", "acked_version", "position", "history"}
"""Fields that a resumed run does not take from the document."""
_OPTIONAL = _FROM_ELSEWHERE | {"instance_id", "epoch"}
"""Also those that are absent in checkpoints from before there were instances."""


def _mask(indices: Iterable[int]) -> bytes:
    """The samples of a group. The indices of groups put by others are arbitrary; only their number matters there."""
    found = list(indices)
    return index_mask(found if max(found, default=0) <= MAX_SAMPLE_INDEX else range(len(found)))
