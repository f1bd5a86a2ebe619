"""Reports what waits for what, why, since when and until when: the trainer, then problems, then the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.v1 import broker_pb2
from penstock.wire.timestamps import timestamp
from services.broker.operations.delivery import oldest_due, step_view
from services.broker.operations.leasing import NOTHING_QUEUED
from services.broker.rules.batching import StepView
from services.broker.stalls.causes import (
    EVALUATE,
    SUBMITTER,
    TRAIN,
    TRAINER,
    Cause,
    Present,
    counted,
    may_start,
    progress,
    stalls,
)
from services.broker.state.run_state import RunState


def waiting(state: RunState, present: Present, now_s: float) -> broker_pb2.Waiting:
    """The explanation for a trainer that gets nothing."""
    num_leased, num_scoring = state.num_held(TRAIN)
    return broker_pb2.Waiting(
        reason=trainer_wait(state, stalls(state, present, now_s), now_s).text,
        num_queued_groups=state.num_waiting(TRAIN),
        num_leased_groups=num_leased,
        num_scoring_groups=num_scoring,
    )


def waits(state: RunState, present: Present, now_s: float) -> list[broker_pb2.Wait]:
    """Every current stall, one entry per cause."""
    wrong = stalls(state, present, now_s)
    trainer = trainer_wait(state, wrong, now_s)
    found = [trainer, *(cause for cause in wrong if not trainer.text.endswith(cause.text))]
    evaluation = progress(state, EVALUATE, now_s)
    if evaluation is not None:
        found.append(evaluation.of("evaluation", ""))
    elif state.index.ready[EVALUATE]:
        text = (
            f"{counted(len(state.index.ready[EVALUATE]), 'group', 'is', 'are')} ready: the trainer's stream takes none"
        )
        found.append(Cause(waiter="evaluation", owner=TRAINER, text=text, since_s=state.run.version_s))
    found += _idle_generators(state, present.speaking(now_s))
    return [_message(cause) for cause in found]


def trainer_wait(state: RunState, wrong: list[Cause], now_s: float) -> Cause:
    """The cause of the trainer's wait: for missing groups a problem, or else their slowest part."""
    since_s, per_step = state.run.version_s, state.limits.groups_per_step
    step = step_view(state)
    num_delivered, num_ready = step.num_delivered, state.index.num_ready
    if num_delivered >= per_step:
        text = f"all {num_delivered} groups of this step are delivered: it computes, or must acknowledge the step"
        return Cause(waiter="the run", owner=TRAINER, text=text, since_s=since_s)
    num_due = _num_due_before_ready(state, step)
    num_missing = num_due or per_step - num_delivered - num_ready
    if num_missing <= 0:
        text = f"{counted(num_ready, 'group', 'is', 'are')} ready, but its stream takes none"
        return Cause(waiter="the run", owner=TRAINER, text=text, since_s=since_s)
    cause = next(iter(wrong), None) or progress(state, TRAIN, now_s)
    if cause is None:
        text = "no training group is in flight: submit prompts"
        if num_delivered or num_ready:
            text = f"{_missing(num_missing, per_step)} and none is on its way: submit prompts"
        return Cause(waiter="trainer", owner=SUBMITTER, text=text, since_s=since_s)
    if num_due:
        return cause.of("trainer", f"{counted(num_due, 'group')} must come first or be too stale; ")
    return cause.of("trainer", f"{_missing(num_missing, per_step)}; ")


def _missing(number: int, per_step: int) -> str:
    return f"{number} of {counted(per_step, 'group')} {'is' if number == 1 else 'are'} missing"


def _num_due_before_ready(state: RunState, step: StepView) -> int:
    """Number of groups that the ready ones must wait for, since the step has no place for both; 0 if none."""
    num_ready_due = state.index.num_ready_due(oldest_due(state))
    is_full = step.num_delivered + step.num_due >= step.limits.groups_per_step
    return max(0, step.num_due - num_ready_due) if state.index.num_ready and not num_ready_due and is_full else 0


def _idle_generators(state: RunState, speaking: list[broker_pb2.GeneratorView]) -> Iterator[Cause]:
    idle = [
        view
        for view in speaking
        if not state.generation_leases.get(view.hello.generator_id) and not view.beat.is_draining
    ]
    held_back = [view for view in idle if state.queue and not may_start(state, view.beat.policy_version)]
    if idle and not state.queue:
        yield _idle(state, idle, SUBMITTER, NOTHING_QUEUED)
    elif held_back and not may_start(state, state.run.policy_version):
        yield _idle(state, held_back, TRAINER, "admission: the trainer must finish a step before more is started")


def _idle(state: RunState, idle: list[broker_pb2.GeneratorView], owner: str, text: str) -> Cause:
    name = idle[0].hello.generator_id
    waiter = f"generator {name}" if len(idle) == 1 else f"generator {name} and {len(idle) - 1} more"
    return Cause(waiter=waiter, owner=owner, text=text, since_s=state.run.version_s)


def _message(cause: Cause) -> broker_pb2.Wait:
    return broker_pb2.Wait(
        waiter=cause.waiter,
        owner=cause.owner,
        reason=cause.text,
        since_time=timestamp(cause.since_s),
        deadline_time=None if cause.deadline_s is None else timestamp(cause.deadline_s),
    )
