"""Keeps one trainer per run, and one run behind each id. Pure operations on a RunState.

Promises:
- A take-over raises the run's epoch in the commit that changes the owner; from then on every call with an older epoch,
  or with the same one in another trainer's name, is refused. A former owner can therefore never act again,
  however late it wakes up.
- The groups delivered to the former owner become ready again for the new one.
- A call that names another instance of the run changes nothing.
- A trainer that resumes a run automatically takes it over only if no other trainer has since it last owned it.
- If the store loses its last commits, including the take-over, the owner's next call restores it.
"""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.errors import FencedError, InvalidFieldError, OtherInstanceError, require
from penstock.v1 import broker_pb2
from services.broker.ingest.validation import MAX_ID_CHARACTERS
from services.broker.operations import delivery
from services.broker.records_pb2 import RunRecord
from services.broker.state.run_state import RunState

MAX_EPOCH = 2**48
"""More take-overs than any run has; leaves headroom above the epoch that a client states."""


def check_form(owner: broker_pb2.RunOwner) -> None:
    """Raise InvalidFieldError if the caller's owner fields are malformed."""
    check_fields(owner, field="owner")
    if owner.epoch and not owner.owner_id:
        raise InvalidFieldError("owner.owner_id: must be set where there is an epoch", field="owner.owner_id")


def check_fields(owner: broker_pb2.RunOwner, *, field: str) -> None:
    """Raise InvalidFieldError if a part of an owner is out of bounds; `field` names where it was sent."""
    for name, value in (("instance_id", owner.instance_id), ("owner_id", owner.owner_id)):
        is_good = len(value) <= MAX_ID_CHARACTERS and value.isprintable()
        require(is_good, f"{field}.{name}", value[:80], f"at most {MAX_ID_CHARACTERS} printable characters")
    require(owner.epoch <= MAX_EPOCH, f"{field}.epoch", owner.epoch, f"at most {MAX_EPOCH}")


def take_over(
    state: RunState, owner: broker_pb2.RunOwner, now_s: float, *, resumes: broker_pb2.RunOwner | None = None
) -> None:
    """Make a trainer the run's owner; no change if it already is (its answer was lost).

    Args:
        state: The run.
        owner: The caller.
        now_s: Unix seconds.
        resumes: The last owner the caller knows of if it resumes the run automatically; None if it was asked to.

    Raises:
        InvalidFieldError: a call without a name, for a run that has an owner.
        OtherInstanceError: the caller means another instance of the run.
        FencedError: another trainer has taken the run over since `resumes` owned it.
    """
    run = state.run
    check_instance(run, owner)
    if owner.owner_id == run.owner.owner_id and owner.epoch <= run.owner.epoch:
        return
    if not owner.owner_id:
        raise InvalidFieldError(
            f"owner.owner_id: must be set to take over run {run.run_id!r}, which {run.owner.owner_id!r} owns",
            field="owner.owner_id",
        )
    if resumes is not None:
        _check_not_replaced(run, resumes)
    _install(state, owner, epoch=max(run.owner.epoch, owner.epoch) + 1, now_s=now_s)


def admit(state: RunState, owner: broker_pb2.RunOwner, now_s: float) -> None:
    """Admit a call if the caller owns the run.

    A caller with a later epoch than the store's is its owner too: the store lost its last commits.

    Raises:
        InvalidFieldError: the caller's owner fields are malformed.
        OtherInstanceError: the caller means another instance of the run.
        FencedError: another trainer has taken the run over.
    """
    check_form(owner)
    check_instance(state.run, owner)
    if owner.epoch > state.run.owner.epoch:
        _install(state, owner, epoch=owner.epoch, now_s=now_s)
    check_not_fenced(state.run, owner)


def check_not_fenced(run: RunRecord, owner: broker_pb2.RunOwner) -> None:
    """Raise FencedError if the run has another owner than the caller, by a replica that may be behind the store."""
    if owner.epoch > run.owner.epoch or (owner.epoch, owner.owner_id) == (run.owner.epoch, run.owner.owner_id):
        return
    raise FencedError(
        f"fenced: trainer {run.owner.owner_id!r} took run {run.run_id!r} over at {_time(run.owner_s)} "
        f"(epoch {run.owner.epoch}, the caller's is {owner.epoch}); this trainer must end",
        run_id=run.run_id,
        owner_id=run.owner.owner_id,
        epoch=run.owner.epoch,
    )


def _check_not_replaced(run: RunRecord, known: broker_pb2.RunOwner) -> None:
    """Raise FencedError; an epoch older than the known one means that the store lost its last commits."""
    if run.owner.epoch <= known.epoch or run.owner.owner_id == known.owner_id:
        return
    raise FencedError(
        f"fenced: trainer {run.owner.owner_id!r} took run {run.run_id!r} over at {_time(run.owner_s)} "
        f"(epoch {run.owner.epoch}, this trainer last knew {known.epoch}), so it is not resumed here automatically; "
        "start it here to take it back",
        run_id=run.run_id,
        owner_id=run.owner.owner_id,
        epoch=run.owner.epoch,
    )


def check_instance(run: RunRecord, owner: broker_pb2.RunOwner) -> None:
    """Raise OtherInstanceError if the caller means another run with the same id."""
    if owner.instance_id == run.owner.instance_id:
        return
    raise OtherInstanceError(
        f"run_id: {run.run_id!r} is another run in the broker's store: instance {_name(run.owner.instance_id)}, opened "
        f"at {_time(run.open_s)}, now at version {run.policy_version}, not instance {_name(owner.instance_id)}; go on "
        "with that one from its own folder (penstock run --resume DIR), choose another run id, or delete it "
        f"(penstock runs delete {run.run_id})",
        run_id=run.run_id,
        instance_id=run.owner.instance_id,
    )


def _install(state: RunState, owner: broker_pb2.RunOwner, *, epoch: int, now_s: float) -> None:
    state.run.owner.owner_id, state.run.owner.epoch = owner.owner_id, epoch
    state.run.owner_s = now_s
    delivery.hand_all_back(state)


def _name(instance_id: str) -> str:
    return repr(instance_id) if instance_id else "without a name"


def _time(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"
