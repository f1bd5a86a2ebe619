"""What the fault test's generators, workers and trainer do, as functions of a sample's name, so that all is checked.

A completion, its length and its score follow from (group, sample); a token's log-prob from the token and the policy
version that is said to have sampled it. Whoever sees a trajectory can tell a token that is missing, doubled, of another
sample or under a wrong version.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import decode_versions, float32_array, float32_bytes, int32_array, int32_bytes

RUN_ID = "faults"
GROUP_SIZE = 4
GROUPS_PER_STEP = 4
MAX_STALENESS = 2
MAX_COMPLETION_TOKENS = 160
NUM_GROUPS_AHEAD = 3 * GROUPS_PER_STEP
LEASE_S = 4
NUM_RETAINED_STEPS = 1024
"""More than the run takes, so that all of it can be compared at the end."""


def limits() -> broker_pb2.RunLimits:
    """The run's limits. A sample may lose any number of leases: faults are many here."""
    message = broker_pb2.RunLimits(
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        max_staleness=MAX_STALENESS,
        max_completion_tokens=MAX_COMPLETION_TOKENS,
        max_leases_per_sample=1000,
    )
    message.generation_lease.FromSeconds(LEASE_S)
    message.scoring_lease.FromSeconds(LEASE_S)
    return message


def policy() -> broker_pb2.RunPolicy:
    """The run's policy: the defaults, and everything retained."""
    return broker_pb2.RunPolicy(num_retained_steps=NUM_RETAINED_STEPS)


def group_id(position: int) -> str:
    """The group of the prompt at a position of the data."""
    return f"g{position:06}"


def prompt(name: str) -> types_pb2.Prompt:
    """A group's prompt."""
    return types_pb2.Prompt(
        group_id=name,
        token_ids=int32_bytes([1, 2, 3]),
        group_size=GROUP_SIZE,
        sampling=types_pb2.SamplingParams(max_new_tokens=MAX_COMPLETION_TOKENS, temperature=1.0),
        text=name,
        answer="yes",
        purpose=types_pb2.PURPOSE_TRAIN,
    )


def completion(name: str, index: int) -> npt.NDArray[np.int32]:
    """The tokens of a sample, 8 to MAX_COMPLETION_TOKENS of them."""
    random = np.random.Generator(np.random.PCG64(_digest(name, index)))
    length = int(random.integers(8, MAX_COMPLETION_TOKENS + 1))
    return random.integers(0, 30_000, length, dtype=np.int32)


def logprobs(tokens: npt.NDArray[np.int32], versions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The log-probs of tokens that these versions sampled."""
    found: npt.NDArray[np.float32] = (-((tokens + 31 * versions) % 997 + 1) / 100).astype(np.float32)
    return found


def score(name: str, index: int) -> float:
    """The score of a sample."""
    return _digest(name, index) % 1000 / 1000


def problems_of(group: types_pb2.TrajectoryGroup, *, trainer_version: int) -> list[str]:
    """What is wrong with a group that a trainer at `trainer_version` was given."""
    name = group.prompt.group_id
    problems = []
    if [trajectory.key.sample_index for trajectory in group.trajectories] != list(range(GROUP_SIZE)):
        problems.append(f"{name}: samples are missing or doubled")
    for trajectory in group.trajectories:
        problems += [f"{name}/{trajectory.key.sample_index}: {what}" for what in _problems(trajectory, trainer_version)]
    return problems


def _problems(trajectory: types_pb2.Trajectory, trainer_version: int) -> list[str]:
    key = trajectory.key
    tokens = int32_array(trajectory.token_ids, "token_ids")
    versions = decode_versions(trajectory.policy_versions, num_tokens=len(tokens), field="policy_versions")
    given = float32_array(trajectory.behavior_logprobs, "behavior_logprobs")
    problems = []
    if not np.array_equal(tokens, completion(key.group_id, key.sample_index)):
        problems.append(f"{len(tokens)} tokens are not those that were decoded")
    elif not np.array_equal(given, logprobs(tokens, versions)):
        problems.append("log-probs and versions do not belong together")
    if float32_bytes([trajectory.score.value]) != float32_bytes([score(key.group_id, key.sample_index)]):
        problems.append(f"score {trajectory.score.value} is not the one that was given")
    if not 0 <= trainer_version - int(versions.min()) <= MAX_STALENESS or int(versions.max()) > trainer_version:
        problems.append(f"versions {versions.min()} to {versions.max()} at trainer version {trainer_version}")
    return problems


def note(folder: Path, kind: str, **facts: object) -> None:
    """Append to what the processes have to say, in one write that outlives a kill."""
    line = json.dumps({"kind": kind, **facts}) + "\n"
    descriptor = os.open(folder / "notes.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def notes(folder: Path) -> list[dict[str, object]]:
    """All that was noted."""
    path = folder / "notes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _digest(name: str, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name}/{index}".encode(), digest_size=8).digest(), "big")
