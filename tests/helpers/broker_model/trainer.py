"""A trainer of the model: submits prompts, takes steps, keeps a ledger, writes checkpoints, crashes and resumes.

It does what the real one does: what it was handed twice it ignores, a version conflict makes it tell the broker its
ledger, and after a crash it opens the run at its checkpoint and submits again what may have been lost.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from penstock.errors import LeaseLostError, PenstockError, UnknownSampleError, VersionConflictError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import index_mask, int32_bytes
from tests.helpers.broker_model.truth import attempt_of, reference_of, tokens_trained_on
from tests.helpers.broker_model.world import MAX_TRIES, RUN, Link, World, settle

CONSUMER = "rank-0"
_TRAIN = types_pb2.PURPOSE_TRAIN


@dataclass(slots=True)
class Memory:
    """What a checkpoint holds."""

    version: int = 0
    ledger: list[tuple[int, dict[str, list[int]]]] = field(default_factory=list)
    """Steps taken: the version each made, and which samples of which group went into it."""
    outstanding: list[str] = field(default_factory=list)

    @property
    def trained(self) -> dict[str, int]:
        """Samples by group, over all steps."""
        return {group_id: len(indices) for _version, groups in self.ledger for group_id, indices in groups.items()}


class ModelTrainer:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memory = Memory()
        self.held: dict[str, types_pb2.TrajectoryGroup] = {}
        self.num_submitted = 0
        self.must_reopen = False
        self.owner = broker_pb2.RunOwner(instance_id="first")
        self.replaced: list[broker_pb2.RunOwner] = []
        """Trainers that were replaced by this one: each may wake up."""
        self.is_regular = True
        """Whether every step was whole and none was taken back: then nothing can become stale under WAIT."""
        self.accepts_packed_groups = False
        self._checkpoint = Memory()
        self._credit = self._num_received = 0
        self._link = Link(world, "StreamMicrobatches", self._on_response)

    # -- the run -------------------------------------------------------------------------------------------------------

    async def take_over(self) -> None:
        """A new process becomes the run's trainer."""
        if self.owner.epoch:
            former = broker_pb2.RunOwner()
            former.CopyFrom(self.owner)
            self.replaced = [*self.replaced, former][-4:]
        self.owner.owner_id = f"trainer-{len(self.replaced)}-{self.owner.epoch}"
        self.owner.epoch = (await self.open(takes_over=True)).epoch

    async def come_back(self) -> None:
        """Tell a store that lost commits what it forgot; what it has not heard of being taken back is taken back."""
        try:
            await self.open()
        except VersionConflictError:
            assert self.world.has_lost_commits
            await self.open(takes_over=True)

    async def open(self, *, takes_over: bool = False) -> broker_pb2.OpenRunResponse:
        """Open the run at the present version, with the ledger."""
        steps = [
            broker_pb2.StepRecord(
                policy_version=version, group_ids=list(groups), trained_samples=map(index_mask, groups.values())
            )
            for version, groups in self.memory.ledger[-64:]
        ]
        request = broker_pb2.OpenRunRequest(
            run_id=RUN,
            limits=self.world.setting.limits,
            policy=self.world.setting.policy,
            policy_version=self.memory.version,
            steps=steps,
            owner=self.owner,
            takes_over=takes_over,
        )
        before = await self._version_at_broker()
        response = await self.world.call("OpenRun", request)
        assert response.policy_version == self.memory.version
        if before is not None and before > self.memory.version:
            self.world.truth.forget_future(self.memory.version)
        self.must_reopen = False
        return response

    async def _version_at_broker(self) -> int | None:
        try:
            return (await self.world.audit()).policy_version
        except PenstockError:
            return None

    def save(self) -> None:
        """Write a checkpoint."""
        self._checkpoint = copy.deepcopy(self.memory)

    async def crash(self) -> None:
        """Lose everything since the last checkpoint, and start again from there."""
        self.is_regular = self.is_regular and self._checkpoint.version == self.memory.version
        await self._link.close()
        self.held.clear()
        self.memory = copy.deepcopy(self._checkpoint)
        await self.take_over()
        await self.submit_again()

    # -- prompts -------------------------------------------------------------------------------------------------------

    async def submit(self, count: int, purpose: types_pb2.Purpose.ValueType = _TRAIN) -> list[types_pb2.ItemError]:
        """New prompts; returns those refused because the queue is full."""
        names = [f"g{self.num_submitted + number}" for number in range(1, count + 1)]
        self.num_submitted += count
        if purpose == _TRAIN:
            self.memory.outstanding += names
        else:
            names = [f"e{name}" for name in names]
        return await self._submit(names, purpose)

    async def submit_again(self) -> list[types_pb2.ItemError]:
        """Whatever may be missing at the broker."""
        return await self._submit([name for name in self.memory.outstanding], _TRAIN) if self.memory.outstanding else []

    async def _submit(self, names: list[str], purpose: types_pb2.Purpose.ValueType) -> list[types_pb2.ItemError]:
        limits = self.world.limits
        sizes = [self._size(name) if purpose == _TRAIN else 1 for name in names]
        prompts = [
            types_pb2.Prompt(
                group_id=name,
                token_ids=int32_bytes([1, 2]),
                group_size=size,
                sampling=types_pb2.SamplingParams(max_new_tokens=limits.max_completion_tokens),
                purpose=purpose,
            )
            for name, size in zip(names, sizes, strict=True)
        ]
        request = broker_pb2.SubmitPromptsRequest(run_id=RUN, prompts=prompts)
        response = await self.world.call("SubmitPrompts", request)
        assert {error.reason for error in response.errors} <= {"QUEUE_FULL"}
        refused = {error.index for error in response.errors}
        if purpose == _TRAIN:
            num_extra = self.world.setting.policy.num_extra_samples
            for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
                if index not in refused:
                    self.world.truth.submitted.setdefault(name, size + num_extra)
        return list(response.errors)

    def _size(self, name: str) -> int:
        """Groups are of unlike sizes, each always of the same."""
        return 1 + sum(name.encode()) % self.world.limits.group_size

    async def drop(self, group_ids: list[str]) -> None:
        """Give groups up."""
        request = broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=group_ids, reason="unwanted", owner=self.owner)
        await self.world.call("DropGroups", request)
        for group_id in group_ids:
            self.held.pop(group_id, None)
            if group_id in self.memory.outstanding:
                self.memory.outstanding.remove(group_id)

    def forget_in_flight(self) -> None:
        """All that was submitted or is held was given up."""
        self.held.clear()
        self.memory.outstanding.clear()

    # -- groups --------------------------------------------------------------------------------------------------------

    def pull(self, max_held: int) -> None:
        """Ask for groups until `max_held` are held."""
        want = max(0, max_held - len(self.held))
        if self._link.is_open:
            self._credit = max(self._credit, self._num_received + want)
            self._link.send(broker_pb2.StreamMicrobatchesRequest(credit_total=self._credit))
            return
        self._num_received, self._credit = 0, want
        hello = broker_pb2.TrainerHello(
            run_id=RUN,
            consumer_id=CONSUMER,
            purpose=_TRAIN,
            held_group_ids=list(self.held),
            max_groups=4,
            accepts_packed_groups=self.accepts_packed_groups,
            owner=self.owner,
        )
        self._link.open(broker_pb2.StreamMicrobatchesRequest(hello=hello, credit_total=want))

    async def reconnect(self) -> None:
        """The connection was lost, and groups with it."""
        await self._link.close()

    def _on_response(self, response: broker_pb2.StreamMicrobatchesResponse) -> None:
        if response.HasField("microbatch") and response.microbatch.policy_version < self.memory.version:
            assert self.world.has_lost_commits
            self.must_reopen = True
        packed = types_pb2.TrajectoryGroups.FromString(response.microbatch.packed_groups).groups
        assert self.accepts_packed_groups or not packed
        for group in (*response.microbatch.groups, *packed):
            self._num_received += 1
            assert self._num_received <= self._credit, "more groups than credits"
            self._take(group, response.microbatch.policy_version)

    def _take(self, group: types_pb2.TrajectoryGroup, policy_version: int) -> None:
        group_id = group.prompt.group_id
        self.check_payload(group)
        if group_id in self.memory.trained:
            assert self.world.has_lost_commits, f"{group_id} was trained and is handed out again"
            self.must_reopen = True
        elif group_id in self.held:
            assert self.world.has_lost_commits, f"{group_id} is held and is handed out again"
        else:
            assert policy_version - oldest_version(group) <= self.world.limits.max_staleness
            self.held[group_id] = group

    def check_payload(self, group: types_pb2.TrajectoryGroup) -> None:
        """Every token and score is one that was given to the broker, where it was given."""
        put = self.world.truth.put.get(group.prompt.group_id)
        if put is not None:
            assert group == put, "a group that was put came out as another"
            return
        size = self._size(group.prompt.group_id)
        assert min(2, size) <= len(group.trajectories) <= size
        for trajectory in group.trajectories:
            sample = attempt_of(trajectory.key)
            tokens = tokens_trained_on(trajectory)
            self.world.truth.shown(sample, [token.serial for token in tokens])
            assert trajectory.finish_reason in (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH)
            assert trajectory.score.status == types_pb2.SCORE_STATUS_OK
            assert trajectory.score.value in self.world.truth.scores[sample]
            if self.world.setting.policy.needs_reference_logprobs and group.prompt.purpose == types_pb2.PURPOSE_TRAIN:
                assert trajectory.reference_logprobs == reference_of(token.serial for token in tokens)

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def step(self) -> None:
        """Train on what is held: the optimiser's step, then the receipt."""
        if self.must_reopen:
            await self.come_back()
        await self._drop_stale()
        if not self.held:
            return
        self.is_regular = self.is_regular and len(self.held) == self.world.limits.groups_per_step
        groups = {
            group_id: [trajectory.key.sample_index for trajectory in group.trajectories]
            for group_id, group in self.held.items()
        }
        assert not groups.keys() & self.memory.trained.keys()
        self.memory.version += 1
        self.memory.ledger.append((self.memory.version, groups))
        self.memory.outstanding = [name for name in self.memory.outstanding if name not in groups]
        self.held.clear()
        await self.acknowledge()

    async def _drop_stale(self) -> None:
        """A trainer looks at the bound itself: a store that lost commits has forgotten how far the run is."""
        stale = [
            group_id
            for group_id, group in self.held.items()
            if self.memory.version - oldest_version(group) > self.world.limits.max_staleness
        ]
        if stale:
            assert self.world.has_lost_commits, f"{stale} are too old"
            await self.drop(stale)

    async def acknowledge(self) -> broker_pb2.AckStepResponse | None:
        """The receipt of the last step; where the broker is behind it is told the ledger instead."""
        version, groups = self.memory.ledger[-1]
        request = broker_pb2.AckStepRequest(
            run_id=RUN, consumer_id=CONSUMER, group_ids=list(groups), policy_version=version, owner=self.owner
        )
        try:
            response = await self.world.call("AckStep", request)
        except (VersionConflictError, LeaseLostError, UnknownSampleError):
            assert self.world.has_lost_commits
            await self.come_back()
            return None
        assert response.policy_version == self.memory.version
        # What a broker marked trained on the trainer's word it counts as its store remembers it.
        assert response.num_samples == sum(map(len, groups.values())) or self.world.has_lost_commits
        assert response.max_staleness_seen <= self.world.limits.max_staleness
        return response

    async def fill_and_step(self, *, least: int) -> bool:
        """Pull for a while, then step if at least `least` groups came; whether it did."""
        for _ in range(MAX_TRIES):
            self.pull(self.world.limits.groups_per_step)
            await settle()
            if len(self.held) >= least:
                await self.step()
                return True
            if self._link.error() is not None:
                return False
        return False


def oldest_version(group: types_pb2.TrajectoryGroup) -> int:
    """The oldest version among a group's tokens."""
    return min(trajectory.min_policy_version for trajectory in group.trajectories)
