"""Adds prompts to the queue. Pure operations on a RunState."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from penstock.errors import InvalidFieldError, QueueFullError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.ingest.validation import check_prompt, item_error
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.state import counters
from services.broker.state.run_state import RunState


def submit(
    state: RunState,
    prompts: Sequence[types_pb2.Prompt],
    *,
    retired: Collection[str],
    now_s: float,
    forecasts: Mapping[str, float] = MappingProxyType({}),
) -> list[types_pb2.ItemError]:
    """Queue prompts; returns the refused ones. Ids seen before are accepted again without effect.

    Training and evaluation each may have `max_queued_groups` waiting, and no more than a step's groups once the run has
    all that its policy allows in the store: an evaluation that fills its share never keeps training prompts out, and
    vice versa. `forecasts` are expected completion lengths in tokens by group id, if known.
    """
    state.check_open()
    limits = state.limits
    num_waiting = {purpose: state.num_waiting(purpose) for purpose in state.index.ready}
    errors: list[types_pb2.ItemError] = []
    for index, prompt in enumerate(prompts):
        if state.knows(prompt.group_id) or prompt.group_id in retired:
            continue
        try:
            check_prompt(prompt, limits)
            if num_waiting[prompt.purpose] >= limits.max_queued_groups:
                bound = f"{limits.max_queued_groups} groups wait unleased, the run's limit"
                raise QueueFullError(f"prompts: {bound}; send it again later")
            is_full = state.index.live_bytes >= state.policy.max_live_bytes
            if is_full and num_waiting[prompt.purpose] >= limits.groups_per_step:
                bound = f"samples that wait or are under way take half of its {state.policy.max_retained_bytes} bytes"
                raise QueueFullError(f"policy.max_retained_bytes: {bound}; send it again later")
        except (InvalidFieldError, QueueFullError) as error:
            errors.append(item_error(index, error))
            continue
        num_waiting[prompt.purpose] += 1
        _add(state, prompt, now_s, forecasts.get(prompt.group_id))
    return errors


def _add(state: RunState, prompt: types_pb2.Prompt, now_s: float, predicted_tokens: float | None) -> None:
    run = state.run
    run.last_sequence += 1
    num_samples, data = prompt.group_size, prompt.SerializeToString()
    if prompt.purpose == types_pb2.PURPOSE_TRAIN:
        num_samples += state.policy.num_extra_samples
        counters.count_submitted(state, version=run.policy_version, num_samples=num_samples)
    group = GroupRecord(
        group_id=prompt.group_id,
        sequence=run.last_sequence,
        purpose=prompt.purpose,
        num_prompt_tokens=len(prompt.token_ids) // 4,
        prompt_bytes=len(data),
        submit_s=now_s,
        submit_version=run.policy_version,
        traceparent=prompt.traceparent,
        samples=[
            SampleRecord(state=broker_pb2.SAMPLE_STATE_QUEUED, predicted_tokens=predicted_tokens)
            for _ in range(num_samples)
        ],
    )
    if prompt.HasField("min_policy_version"):
        group.prompt_min_version = prompt.min_policy_version
    # It may have been retired since the caller checked.
    state.pending.fresh.append(prompt.group_id)
    state.add(group, data)
