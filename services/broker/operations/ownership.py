"""Who trains a run: one trainer at a time, and one run behind each id. Pure operations on a RunState.

Promises:
- Whoever takes a run over raises its epoch, in the commit that makes it the owner; from then on every call that carries
  an older epoch, or the same one in another trainer's name, is refused. A former owner can therefore never act again,
  however late it wakes up.
- What the former owner held is ready again for the new one.
- A call in the name of another instance of the run changes nothing.
- A trainer that resumes a run by itself takes it over only if nobody else has since it last owned it.
- A store that lost its end, the take-over with it, learns of it again from the owner's next call.
"""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.errors import FencedError, InvalidFieldError, OtherInstanceError
from penstock.v1 import broker_pb2
from services.broker.ingest.validation import MAX_ID_CHARACTERS
from services.broker.operations import delivery
from services.broker.records_pb2 import RunRecord
from services.broker.state.run_state import RunState

MAX_EPOCH = 2**48
"""More than anybody takes a run over; leaves room to count on from what a client states."""


def check_form(owner: broker_pb2.RunOwner) -> None:
    """Raises InvalidFieldError where a caller's statement of who it is is not well formed."""
    check_fields(owner, field="owner")
    if owner.epoch and not owner.owner_id:
        raise InvalidFieldError("owner.owner_id: must be set where there is an epoch", field="owner.owner_id")


def check_fields(owner: broker_pb2.RunOwner, *, field: str) -> None:
    """Raises InvalidFieldError where a part of an owner is out of bounds; `field` is where it was sent."""
    for name, value in (("instance_id", owner.instance_id), ("owner_id", owner.owner_id)):
        if len(value) > MAX_ID_CHARACTERS or not (value.isprintable() or not value):
            raise InvalidFieldError(
                f"{field}.{name}: {value[:80]!r} must have at most {MAX_ID_CHARACTERS} printable characters",
                field=f"{field}.{name}",
            )
    if owner.epoch > MAX_EPOCH:
        raise InvalidFieldError(f"{field}.epoch: {owner.epoch}; must be at most {MAX_EPOCH}", field=f"{field}.epoch")


def take_over(
    state: RunState, owner: broker_pb2.RunOwner, now_s: float, *, resumes: broker_pb2.RunOwner | None = None
) -> None:
    """Make a trainer the run's owner; one that is already (its answer was lost) stays so.

    Args:
        state: The run.
        owner: The caller.
        now_s: Unix seconds.
        resumes: The last owner the caller knows of, when it resumes the run by itself; None when it was asked to.

    Raises:
        InvalidFieldError: a call without a name, of a run that has an owner.
        OtherInstanceError: the run is another instance.
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
    """Let a call in if the caller owns the run.

    A caller with a later epoch than the store's is its owner too: the store lost its end.

    Raises:
        InvalidFieldError: the caller's statement is not well formed.
        OtherInstanceError: the run is another instance.
        FencedError: another trainer has taken the run over.
    """
    check_form(owner)
    check_instance(state.run, owner)
    if owner.epoch > state.run.owner.epoch:
        _install(state, owner, epoch=owner.epoch, now_s=now_s)
    check_not_fenced(state.run, owner)


def check_not_fenced(run: RunRecord, owner: broker_pb2.RunOwner) -> None:
    """Raises FencedError where a run has another owner than the caller, by a copy that may be behind the store."""
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
    """Raises FencedError; an older epoch than the known one is that of a store that lost its end."""
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
    """Raises OtherInstanceError where the caller means another run of the same id."""
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
