"""Decides which generator may start which training group, so that no sample becomes too stale. Pure.

The rule bounds the work under way, not the age of a finished sample. With B groups a step, bound S and the
trainer at version v, a group may be started by version m <= v if

    v * B + (groups started and neither trained nor dropped) + 1  <=  (m + S + 1) * B

Then at most (m + S + 1) * B groups can ever precede or accompany one that version m started, so its turn comes no later
than the step that starts from version m + S. Delivery (`batching`) keeps that order. v * B stands for the groups
trained, so that a step of fewer groups does not loosen the bound.

The run's StalenessPolicy (`penstock.staleness`) decides which version m is. If it is not the generator's own, a
lagging generator may start groups that end too late, which `drops.drop_stale` drops.

Besides, once the run has as much in the store as its policy allows, nothing is started beyond one step's groups: those
always come, or the trainer could never make room.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.staleness.policy import max_begun
from services.broker.rules.limits import Limits
from services.broker.rules.sample_policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a sample may be leased, and if not, a readable reason."""

    is_allowed: bool
    reason: str = ""


ALLOWED = Verdict(is_allowed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
    """The rule at one moment of a run."""

    limits: Limits
    policy: Policy
    policy_version: int
    """The trainer's version."""
    num_started: int
    """Training groups started and neither trained nor dropped."""
    is_full: bool = False
    """Whether what waits and is under way takes as much of the store as the run's policy allows."""

    def max_started(self, generator_version: int) -> int:
        """Groups that may be under way, the new one included, when this version starts one."""
        version = self.policy.stale.start_version(trainer=self.policy_version, generator=generator_version)
        return max(0, max_begun(self.limits, version) - self.policy_version * self.limits.groups_per_step)

    def judge(
        self, *, generator_version: int, min_version: int | None = None, prompt_min_version: int | None = None
    ) -> Verdict:
        """Whether a generator may take a sample of a training group; by default whether it may start any.

        Args:
            generator_version: the version of the generator's weights.
            min_version: oldest version that worked on the group; None if it is not started.
            prompt_min_version: the version that its prompt requires, if any.
        """
        version, bound = self.policy_version, self.limits.max_staleness
        if generator_version > version:
            return _no(
                f"the generator holds version {generator_version}, ahead of the run's {version}, which it must load"
            )
        if generator_version < version - bound:
            return _no(f"the generator holds version {generator_version}, more than {bound} behind the run's {version}")
        if prompt_min_version is not None and generator_version < prompt_min_version:
            return _no(f"the prompt asks for version {prompt_min_version}, the generator holds {generator_version}")
        if min_version is not None and self.policy.stale.may_join(group=min_version, generator=generator_version):
            return ALLOWED
        return self._judge_number(generator_version, is_start=min_version is None)

    def _judge_number(self, generator_version: int, *, is_start: bool) -> Verdict:
        """Whether this many groups may be out, the sample's included."""
        if is_start and self.is_full and self.num_started >= self.limits.groups_per_step:
            return _no(
                f"policy.max_retained_bytes: half of its {self.policy.max_retained_bytes} bytes wait or are under way, "
                f"and {self.num_started} groups are out, enough for a step; the trainer must finish one"
            )
        num_started = self.num_started + is_start
        if num_started <= self.max_started(generator_version):
            return ALLOWED
        return _no(
            f"admission: a generator at version {generator_version} may start a group while at most "
            f"{self.max_started(generator_version)} are out, and {self.num_started} are; the trainer must finish a step"
        )


def judge_evaluation(*, generator_version: int, prompt_min_version: int | None) -> Verdict:
    """Whether a generator may take a sample of an evaluation group: it only needs the requested version."""
    if prompt_min_version is not None and generator_version < prompt_min_version:
        return _no(f"an evaluation asks for version {prompt_min_version}, the generator holds {generator_version}")
    return ALLOWED


def _no(reason: str) -> Verdict:
    return Verdict(is_allowed=False, reason=reason)
