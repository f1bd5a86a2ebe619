"""Makes trajectories of a stated size whose content follows from their number, so that consumers check each byte."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.broker.peers.arrays import NUM_TEMPLATES, make_templates
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import encode_versions


@dataclass(frozen=True)
class Template:
    """The arrays of one kind of trajectory, as bytes."""

    prompt_ids: bytes
    token_ids: bytes
    logprobs: bytes
    advantages: bytes


@dataclass(frozen=True)
class Workload:
    """Trajectories of `num_tokens` response tokens behind prompts of 256."""

    num_tokens: int
    num_per_put: int
    """Trajectories per put."""
    groups_per_step: int

    @cached_property
    def templates(self) -> list[Template]:
        """Contents of trajectories."""
        return [
            Template(**{name: array.tobytes() for name, array in arrays.items()})
            for arrays in make_templates(self.num_tokens)
        ]

    @cached_property
    def versions(self) -> types_pb2.VersionRuns:
        """All tokens are of version 0."""
        return encode_versions(np.zeros(self.num_tokens, dtype=np.int64))

    @cached_property
    def size_bytes(self) -> int:
        """Wire size of one trajectory: 13.6 kB for 1,024 tokens."""
        return len(self.group("p0-1000000", 0).SerializeToString())

    def group(self, group_id: str, number: int) -> types_pb2.TrajectoryGroup:
        """Trajectory `number` as its own group.

        Filled in place: passing messages to a constructor copies them, which takes three times as long.
        """
        template = self.templates[number % NUM_TEMPLATES]
        group = types_pb2.TrajectoryGroup()
        prompt = group.prompt
        prompt.group_id = group_id
        prompt.token_ids = template.prompt_ids
        prompt.group_size = 1
        prompt.sampling.max_new_tokens = self.num_tokens
        prompt.purpose = types_pb2.PURPOSE_TRAIN
        prompt.text = "What is the sum of the first thousand prime numbers, and how would you show that it is right?"
        prompt.answer = "3682913"
        sample = group.trajectories.add()
        sample.key.group_id = group_id
        sample.num_leases = 1
        sample.token_ids = template.token_ids
        sample.behavior_logprobs = template.logprobs
        sample.policy_versions.versions = self.versions.versions
        sample.policy_versions.lengths = self.versions.lengths
        sample.advantages = template.advantages
        sample.finish_reason = types_pb2.FINISH_REASON_STOP
        score = sample.score
        score.status = types_pb2.SCORE_STATUS_OK
        score.value = 1.0
        score.model = "exact_match"
        sample.generator_id = "generator-0"
        return group

    def is_intact(self, group: types_pb2.TrajectoryGroup) -> bool:
        """Whether a group equals, byte for byte, the one made by `group`."""
        template = self.templates[int(group.prompt.group_id.rpartition("-")[2]) % NUM_TEMPLATES]
        (sample,) = group.trajectories
        return (
            group.prompt.token_ids == template.prompt_ids
            and sample.token_ids == template.token_ids
            and sample.behavior_logprobs == template.logprobs
            and sample.advantages == template.advantages
            and sample.score.value == 1.0
        )

    def limits(self) -> broker_pb2.RunLimits:
        """Settings of a run with such trajectories; the staleness bound never limits."""
        return broker_pb2.RunLimits(
            groups_per_step=self.groups_per_step,
            group_size=1,
            max_staleness=1024,
            max_completion_tokens=self.num_tokens,
        )


SHORT = Workload(num_tokens=1_024, num_per_put=32, groups_per_step=1_024)
"""Short trajectories, 13.6 kB each."""
LONG = Workload(num_tokens=16_384, num_per_put=10, groups_per_step=160)
"""Long trajectories, 198 kB each: as many a put as `TrajectorySession.put` puts into a request."""
WORKLOADS = {"short": SHORT, "long": LONG}
