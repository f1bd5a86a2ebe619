"""Opens a run: creates it, takes it over, rewinds it, or lets it catch up. Pure operations on a RunState.

Only a trainer that takes the run over may rewind it, or reopen it once it is closed; any other call returns the run's
state, and restores steps that the store lost.

The trainer's checkpoint decides. Groups that the broker counted as trained but the checkpoint does not know are
delivered again; groups that the checkpoint trained but the broker lost are marked trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from penstock.errors import InvalidFieldError, RunClosedError, RunConflictError, VersionConflictError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import masked_indices
from services.broker.operations import delivery, drops, ownership
from services.broker.records_pb2 import GroupRecord, RunRecord
from services.broker.rules.limits import MAX_GROUP_SIZE, Limits
from services.broker.rules.sample_policy import Policy
from services.broker.rules.staleness import trained_staleness
from services.broker.state import batches, counters, tallies
from services.broker.state.run_state import FORMAT, RunState

_QUEUED = broker_pb2.SAMPLE_STATE_QUEUED
_UNDER_WAY = frozenset((broker_pb2.SAMPLE_STATE_LEASED, broker_pb2.SAMPLE_STATE_SEALING))
ABANDONED_VERSION = "abandoned_version"
MAX_REWINDS_KEPT = 16
"""Rewinds remembered for followers of the run's steps; one that missed more starts at the oldest retained step."""
_DONE_STATES = frozenset((broker_pb2.SAMPLE_STATE_DROPPED, broker_pb2.SAMPLE_STATE_TRAINED))


def create_run(state: RunState, request: broker_pb2.OpenRunRequest, now_s: float) -> broker_pb2.OpenRunResponse:
    """Create a run. Groups of the checkpoint's steps are never accepted again."""
    limits = Limits.from_proto(request.limits)
    policy = Policy.from_proto(request.policy, limits)
    _check_steps(request)
    ownership.check_form(request.owner)
    ownership.check_fields(request.resumes, field="resumes")
    state.create(
        RunRecord(
            run_id=request.run_id,
            owner=broker_pb2.RunOwner(instance_id=request.owner.instance_id),
            limits=limits.to_proto(),
            policy=policy.to_proto(),
            policy_version=request.policy_version,
            books_version=request.policy_version,
            open_s=now_s,
            version_s=now_s,
            format=FORMAT,
        )
    )
    for step in request.steps:
        state.pending.retired.update(step.group_ids)
    _enter(state, request, now_s)
    return broker_pb2.OpenRunResponse(policy_version=request.policy_version, epoch=state.run.owner.epoch)


def reopen_run(state: RunState, request: broker_pb2.OpenRunRequest, now_s: float) -> broker_pb2.OpenRunResponse:
    """Take a run over, closed or not, or reattach to it as its owner.

    Raises:
        OtherInstanceError: the caller means another instance of the run.
        RunConflictError: other limits, or another policy; or the run's payload has expired, or the run is being
        deleted.
        FencedError: the caller neither owns the run nor takes it over; or it resumes the run automatically, and another
            trainer has taken it over.
        RunClosedError: the run is closed, and the caller does not take it over.
        VersionConflictError: the version is older than any step that can still be taken back, or than the run's in a
            call without a take-over.
    """
    run = state.run
    ownership.check_form(request.owner)
    ownership.check_fields(request.resumes, field="resumes")
    ownership.check_instance(run, request.owner)
    _check_payload(run)
    limits = Limits.from_proto(request.limits)
    _check_unchanged(run.run_id, "limits", state.limits.to_proto(), limits.to_proto())
    policy = Policy.from_proto(request.policy, limits)
    _check_unchanged(run.run_id, "policy", state.policy.to_proto(), policy.to_proto())
    _check_steps(request)
    _enter(state, request, now_s)
    num_rewound = num_abandoned = 0
    if request.policy_version < run.policy_version:
        num_rewound, num_abandoned = _rewind(state, request.policy_version, now_s)
    elif request.policy_version > run.policy_version:
        _catch_up(state, request.steps, request.policy_version, now_s)
    return broker_pb2.OpenRunResponse(
        policy_version=run.policy_version,
        existed=True,
        num_groups_rewound=num_rewound,
        num_samples_abandoned=num_abandoned,
        history=run.history,
        num_groups_in_flight=sum(
            batches.num_groups(state.groups[name])
            for name in state.index.live
            if state.groups[name].purpose == types_pb2.PURPOSE_TRAIN
        ),
        epoch=run.owner.epoch,
    )


def _enter(state: RunState, request: broker_pb2.OpenRunRequest, now_s: float) -> None:
    """Make the caller the owner, or check that it is; raises the errors of `reopen_run`."""
    run = state.run
    if request.takes_over:
        ownership.take_over(
            state, request.owner, now_s, resumes=request.resumes if request.HasField("resumes") else None
        )
        run.is_closed, run.close_s = False, 0.0
        return
    ownership.admit(state, request.owner, now_s)
    if run.is_closed:
        raise RunClosedError(f"run {run.run_id!r} is closed; only a call that takes it over opens it again")
    if request.policy_version < run.policy_version:
        raise VersionConflictError(
            f"policy_version: {request.policy_version}, but the run is at {run.policy_version}; only a call that takes "
            "it over goes back",
            policy_version=run.policy_version,
        )


def _check_payload(run: RunRecord) -> None:
    """Raise RunConflictError if a run is closed for good."""
    if run.payload_gone == "expired":
        raise RunConflictError(
            f"run {run.run_id!r} was closed at version {run.policy_version} so long ago that its payload has expired: "
            f"it cannot be resumed; choose another run id, or delete it (penstock runs delete {run.run_id})",
            run_id=run.run_id,
        )
    if run.payload_gone:
        raise RunConflictError(
            f"run {run.run_id!r} is being deleted; finish that first (penstock runs delete {run.run_id})",
            run_id=run.run_id,
        )


def _check_unchanged(run_id: str, name: str, kept: Message, asked: Message) -> None:
    """Raise RunConflictError naming the first field that differs from the run's."""
    old, new = (
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for message in (kept, asked)
    )
    for field, value in old.items():
        if new.get(field) != value:
            raise RunConflictError(
                f"{name}.{field}: run {run_id!r} was opened with {value}, not with {new.get(field)}; "
                "open it with that, or begin another run",
                run_id=run_id,
            )


def _check_steps(request: broker_pb2.OpenRunRequest) -> None:
    if request.policy_version < 0:
        raise InvalidFieldError(f"policy_version: {request.policy_version}; must be at least 0", field="policy_version")
    versions = [step.policy_version for step in request.steps]
    if versions != sorted(set(versions)) or (
        versions and not 1 <= versions[0] <= versions[-1] <= request.policy_version
    ):
        raise InvalidFieldError("steps: versions must rise, from 1 to policy_version at most", field="steps")
    for step in request.steps:
        masks = step.trained_samples
        if masks and (len(masks) != len(step.group_ids) or max(map(len, masks)) * 8 > MAX_GROUP_SIZE):
            raise InvalidFieldError(
                f"steps.trained_samples: {len(masks)} masks for {len(step.group_ids)} groups; must be one for each, of "
                f"at most {MAX_GROUP_SIZE} samples",
                field="steps.trained_samples",
            )


def _rewind(state: RunState, policy_version: int, now_s: float) -> tuple[int, int]:
    """Rewind to an older version; returns the number of groups to deliver again, and of samples that cannot be.

    Tokens sampled by weights of the abandoned versions are discarded: those weights no longer exist, and the trainer
    will publish others under the same number.
    """
    run = state.run
    oldest = tallies.oldest_reachable(state)
    if policy_version < oldest:
        raise VersionConflictError(
            f"policy_version: {policy_version}; the run is at {run.policy_version} and can be taken back to {oldest} "
            f"at most: resume from a newer checkpoint, or start again after `penstock runs delete {run.run_id}`",
            policy_version=run.policy_version,
        )
    run.policy_version, run.version_s = policy_version, now_s
    run.history += 1
    run.rewinds.add(history=run.history, policy_version=policy_version)
    del run.rewinds[:-MAX_REWINDS_KEPT]
    undone = [name for version, names in state.index.trained.items() if version > policy_version for name in names]
    num_undone = sum(_untrain(state, name) for name in sorted(undone))
    for name in sorted(state.index.live):
        if state.index.is_put(name):
            drops.drop_groups(state, batches.newer_than(state.groups[name], policy_version), ABANDONED_VERSION)
        else:
            _forget_future(state, name, policy_version)
    num_abandoned = tallies.abandon_after(state, policy_version)
    drops.drop_stale(state)
    return num_undone, num_abandoned


def _untrain(state: RunState, name: str) -> int:
    """Make a trained record ready again and queue samples whose payload the store lost; returns its groups."""
    with state.edit(name) as group:
        counters.count_record_trained(state, group, -1)
        group.ClearField("trained_version")
        for index, sample in enumerate(group.samples):
            if sample.state == broker_pb2.SAMPLE_STATE_TRAINED:
                sample.state = broker_pb2.SAMPLE_STATE_SCORED
                if not sample.HasField("score"):
                    drops.reset_sample(state, group, index)
        drops.close_group(state, group)
    return batches.num_groups(group)


def _forget_future(state: RunState, group_id: str, policy_version: int) -> None:
    group = state.groups[group_id]
    late = [index for index in range(len(group.samples)) if _is_of_future(group, index, policy_version)]
    if not late:
        return
    if group.consumer_id:
        delivery.hand_back(state, group_id)
    with state.edit(group_id):
        for index in late:
            sample = group.samples[index]
            # How old the tokens in a shard are, the run does not know until it has sealed the sample.
            if group.token_shard or (sample.HasField("max_version") and sample.max_version > policy_version):
                drops.reset_sample(state, group, index)
            else:
                sample.state = _QUEUED
        drops.close_group(state, group)


def _is_of_future(group: GroupRecord, index: int, policy_version: int) -> bool:
    sample = group.samples[index]
    if sample.state in _DONE_STATES:
        return False
    if sample.HasField("max_version") and sample.max_version > policy_version:
        return True
    # Whatever version it was leased for: its generator may have loaded abandoned weights since, whose tokens would pass
    # as those of the weights that get the same number next.
    return sample.state in _UNDER_WAY


def _catch_up(state: RunState, steps: Sequence[broker_pb2.StepRecord], policy_version: int, now_s: float) -> None:
    """Advance to a version whose steps this broker's store has lost."""
    run = state.run
    for step in steps:
        if step.policy_version <= run.policy_version:
            continue
        samples = dict(_trained_samples(step))
        for name, group_ids in state.records_of(samples).items():
            if name in state.index.live:
                if not state.index.is_put(name):
                    _forget_unfinished(state, name, step.policy_version, samples[name])
                delivery.train(state, name, group_ids, step.policy_version)
        for group_id, indices in samples.items():
            if not state.knows(group_id):
                # Even its submission is lost. It was trained on, so it is added to both sides of the audit, without
                # tokens.
                state.pending.retired.add(group_id)
                num_samples = state.limits.group_size if indices is None else len(indices)
                tallies.note_lost_group(state, step.policy_version, num_samples=num_samples)
    delivery.advance(state, policy_version, now_s)


def _trained_samples(step: broker_pb2.StepRecord) -> Iterator[tuple[str, frozenset[int] | None]]:
    """The groups of a step, each with the samples that were trained on; None if the trainer does not name them."""
    for position, group_id in enumerate(step.group_ids):
        yield group_id, masked_indices(step.trained_samples[position]) if step.trained_samples else None


def _forget_unfinished(state: RunState, group_id: str, policy_version: int, indices: Collection[int] | None) -> None:
    """Discard samples that cannot be what the trainer had, before their group is marked trained on its word.

    The store lost the end of such a sample, so its staleness in that step is unknown; the trainer enforced the bound.
    Samples that the trainer does not name were dropped in the lost commits, or left out of the step.
    """
    with state.edit(group_id) as group:
        if indices is not None:
            drops.keep_trained(state, group, indices)
        for index, sample in enumerate(group.samples):
            is_too_old = trained_staleness(sample, policy_version) > state.limits.max_staleness
            if sample.state != broker_pb2.SAMPLE_STATE_DROPPED and (is_too_old or not sample.HasField("score")):
                drops.reset_sample(state, group, index)
                sample.lease_version = policy_version - 1
