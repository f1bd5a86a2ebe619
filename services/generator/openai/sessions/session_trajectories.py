"""Converts finished sessions to the broker's group: one prompt, and a completion for every branch. Pure.

The prompt is the common prefix of all branches. The rest of a branch's own prompt starts its completion, masked:
siblings may differ in their first prompts (another time of day, another tool) and are still compared with each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import Int32, encode_versions, float32_bytes, int32_bytes
from penstock.wire.timestamps import timestamp
from services.generator.openai.sessions.agent_session import Branch, Session
from services.generator.openai.sessions.session_groups import Finished, SessionGroup

MAX_TEXT_CHARACTERS = 256 * 1024
"""Character limit of an exported completion; at most 1 MiB as UTF-8."""
MAX_GROUP_TEXT_CHARACTERS = 8 * 1024 * 1024
"""All exported completions of a group, in equal shares: a group must fit `penstock.wire.pieces.MAX_GROUP_BYTES`."""

OnDropped = Callable[[str, int], None]
"""Called with a reason and the number of branches left out for it; often 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNames:
    """The name and origin of a group."""

    group_id: str
    generator_id: str
    temperature: float
    """What its sessions were sampled with."""
    text_of: Callable[[Sequence[int]], str]
    """Decodes a completion."""
    epoch_s: float
    """The Unix time at zero of the sessions' clock."""
    traceparent: str = ""
    """Trace context of the group; empty if it is not sampled."""


def to_group(
    group: SessionGroup, *, limits: broker_pb2.RunLimits, names: GroupNames, on_dropped: OnDropped
) -> tuple[types_pb2.TrajectoryGroup, list[Session]] | None:
    """The group to put, with the session of each trajectory; None if nothing is left.

    `on_dropped` is called for branches left out.
    """
    parts = [(done, branch) for done in group.finished for branch in done.session.branches()]
    on_dropped("not_taken", sum(len(done.session.not_taken()) for done in group.finished))
    parts = _that_share_a_beginning(parts, on_dropped)
    num_shared = _num_shared([branch.prompt_token_ids for _, branch in parts])
    fitting = [part for part in parts if _num_completion_tokens(part[1], num_shared) <= limits.max_completion_tokens]
    on_dropped("too_long", len(parts) - len(fitting))
    kept = _newest_first(fitting)[: limits.group_size]
    on_dropped("too_many_branches", len(fitting) - len(kept))
    if not kept:
        return None
    prompt_ids = kept[0][1].prompt_token_ids[:num_shared]
    made = types_pb2.TrajectoryGroup(prompt=_prompt(group, prompt_ids, limits, names))
    max_characters = min(MAX_TEXT_CHARACTERS, MAX_GROUP_TEXT_CHARACTERS // len(kept))
    for index, (done, branch) in enumerate(kept):
        sample = _trajectory(index, done, branch, num_shared, names)
        sample.text = sample.text[:max_characters]
        made.trajectories.append(sample)
    made.min_policy_version = min(trajectory.min_policy_version for trajectory in made.trajectories)
    return made, [done.session for done, _ in kept]


def _that_share_a_beginning(
    parts: list[tuple[Finished, Branch]], on_dropped: OnDropped
) -> list[tuple[Finished, Branch]]:
    """Branches that begin with the same token as the first; a prompt has at least one token."""
    first = parts[0][1].prompt_token_ids[0]
    alike = [part for part in parts if part[1].prompt_token_ids[0] == first]
    on_dropped("no_common_prompt", len(parts) - len(alike))
    return alike


def _num_shared(prompts: Sequence[Int32]) -> int:
    """Length of the common prefix of all prompts, >= 1."""
    num_shared = min(map(len, prompts))
    for prompt in prompts:
        differs = np.flatnonzero(prompt[:num_shared] != prompts[0][:num_shared])
        num_shared = int(differs[0]) if differs.size else num_shared
    return num_shared


def _num_completion_tokens(branch: Branch, num_shared: int) -> int:
    return len(branch.prompt_token_ids) - num_shared + len(branch.token_ids)


def _newest_first(parts: list[tuple[Finished, Branch]]) -> list[tuple[Finished, Branch]]:
    """Every session's last branch, then every session's last but one, and so on."""
    behind: Counter[str] = Counter()
    ranks = []
    for done, _ in reversed(parts):
        ranks.append(behind[done.session.session_id])
        behind[done.session.session_id] += 1
    return [part for _, part in sorted(zip(reversed(ranks), parts, strict=True), key=lambda ranked: ranked[0])]


def _prompt(group: SessionGroup, token_ids: Int32, limits: broker_pb2.RunLimits, names: GroupNames) -> types_pb2.Prompt:
    sessions = [done.session.session_id for done in group.finished]
    return types_pb2.Prompt(
        group_id=names.group_id,
        token_ids=int32_bytes(token_ids),
        group_size=limits.group_size,
        sampling=types_pb2.SamplingParams(temperature=names.temperature, max_new_tokens=limits.max_completion_tokens),
        text=names.text_of(token_ids.tolist())[:MAX_TEXT_CHARACTERS],
        metadata_json=json.dumps({"task": group.task, "sessions": sessions[: limits.group_size]}),
        purpose=types_pb2.PURPOSE_TRAIN,
        traceparent=names.traceparent,
    )


def _trajectory(index: int, done: Finished, branch: Branch, num_shared: int, names: GroupNames) -> types_pb2.Trajectory:
    given = branch.prompt_token_ids[num_shared:]
    oldest, newest = int(branch.versions.min()), int(branch.versions.max())
    token_ids = np.concatenate([given, branch.token_ids])
    finish = types_pb2.FINISH_REASON_LENGTH if branch.is_truncated else types_pb2.FINISH_REASON_STOP
    return types_pb2.Trajectory(
        key=types_pb2.SampleKey(group_id=names.group_id, sample_index=index),
        num_leases=1,
        token_ids=int32_bytes(token_ids),
        behavior_logprobs=float32_bytes(np.concatenate([np.zeros(len(given), np.float32), branch.logprobs])),
        policy_versions=encode_versions(
            np.concatenate([np.full(len(given), branch.versions[0], np.int64), branch.versions])
        ),
        loss_mask=bytes(len(given)) + branch.loss_mask.tobytes(),
        finish_reason=finish,
        score=types_pb2.Score(
            status=types_pb2.SCORE_STATUS_OK, value=done.reward, components=done.components, model=done.model
        ),
        min_policy_version=oldest,
        max_policy_version=newest,
        generator_id=names.generator_id,
        submit_time=timestamp(names.epoch_s + done.session.started_s),
        lease_time=timestamp(names.epoch_s + done.session.started_s),
        finish_time=timestamp(names.epoch_s + done.session.last_used_s),
        score_time=timestamp(names.epoch_s + done.finish_s),
        text=names.text_of(token_ids.tolist()),
        routes=b"" if branch.routes is None else branch.routes.tobytes(),
    )
