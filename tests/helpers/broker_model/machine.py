"""The state machine: everything that clients, brokers and a store may do to a run, in any order.

After every rule each of the seven invariants is checked (`invariants`), and at the end everybody works honestly until
all that was submitted is trained or given up: nobody may wait for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from penstock.errors import FencedError, OtherInstanceError, PenstockError, VersionConflictError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.rules.sample_policy import DISPATCH_NAMES
from services.broker.state.run_state import RunState
from tests.helpers.broker_model.generator import ModelGenerator
from tests.helpers.broker_model.invariants import check_all, shards_hold_more
from tests.helpers.broker_model.producer import ModelProducer
from tests.helpers.broker_model.trainer import ModelTrainer
from tests.helpers.broker_model.worker import ModelWorker
from tests.helpers.broker_model.world import MAX_TRIES, RUN, Setting, World, settle
from tests.helpers.broker_model.world_machine import WorldMachine, jumps
from tests.helpers.brokers.broker import duration

NUM_GENERATORS, NUM_WORKERS = 2, 3
SLOTS = 6
CLEAN_UP_S = 5.0
STOP, ABORTED = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_ABORTED
UNFINISHED = types_pb2.FINISH_REASON_UNSPECIFIED
STATUSES = (types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_FAILED)

generators = st.integers(0, NUM_GENERATORS - 1)
workers = st.integers(0, NUM_WORKERS - 1)


def settings_of(group_size: int) -> st.SearchStrategy[Setting]:
    """What a run with groups of this size may be opened with."""
    limits = st.builds(
        broker_pb2.RunLimits,
        groups_per_step=st.integers(1, 2),
        group_size=st.just(group_size),
        max_staleness=st.integers(0, 2),
        max_queued_groups=st.just(8),
        max_completion_tokens=st.just(24),
        generation_lease=st.just(duration(2.0)),
        scoring_lease=st.just(duration(3.0)),
        max_leases_per_sample=st.just(5),
    )
    policy = st.builds(
        broker_pb2.RunPolicy,
        stale=st.sampled_from(broker_pb2.StalePolicy.values()),
        partial_groups=st.sampled_from(broker_pb2.PartialGroupPolicy.values()),
        drops_zero_variance=st.just(False) if group_size == 1 else st.booleans(),
        num_extra_samples=st.sampled_from([0, 0, 1]),
        num_retained_steps=st.sampled_from([0, 2]),
        dispatch=st.sampled_from(DISPATCH_NAMES),
        token_shards=st.sampled_from([0, 0, 2, 3]),
        needs_reference_logprobs=st.booleans(),
        has_environment=st.booleans(),
    )
    return st.builds(Setting, limits=limits, policy=policy)


class BrokerMachine(WorldMachine):
    """One example."""

    @initialize(setting=st.sampled_from([2, 3, 1]).flatmap(settings_of), num_steps=st.sampled_from([0, 1, 2]))
    def open(self, setting: Setting, num_steps: int) -> None:
        self.run(self._open(setting))
        self.run(self._work(num_steps))

    async def _open(self, setting: Setting) -> None:
        world = World(self._make_backing(), self.loop, setting)
        self.trainer = ModelTrainer(world)
        self.generators = [ModelGenerator(world, number) for number in range(NUM_GENERATORS)]
        has_scorer = setting.policy.needs_reference_logprobs
        # The last one works on what the others have done.
        self.workers = [
            ModelWorker(world, number, is_scorer=has_scorer and number == NUM_WORKERS - 1)
            for number in range(NUM_WORKERS)
        ]
        self.producer = ModelProducer(world)
        self.world = world
        await self.trainer.take_over()

    # -- the trainer ---------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def submit(self, count: int) -> None:
        self.run(self.trainer.submit(count))

    @rule()
    def submit_evaluation(self) -> None:
        self.run(self.trainer.submit(1, types_pb2.PURPOSE_EVALUATE))

    @rule()
    def submit_again(self) -> None:
        self.run(self.trainer.submit_again())

    @rule(count=st.integers(0, 2))
    def pull(self, count: int) -> None:
        self.do(lambda: self.trainer.pull(count))

    @rule()
    def step(self) -> None:
        if self.trainer.held:
            self.run(self.trainer.step())

    @rule()
    def acknowledge_again(self) -> None:
        self.run(self._acknowledge_again())

    async def _acknowledge_again(self) -> None:
        before, state = await self.world.audit(), await self.world.state()
        version = self.trainer.memory.version
        # A run that went back may stand at a step that is no longer retained, and is not recognised.
        if self.trainer.memory.ledger and before.policy_version == version and version in state.index.trained:
            await self.trainer.acknowledge()
            assert await self.world.audit() == before

    @rule()
    def acknowledge_what_is_not_next(self) -> None:
        self.run(self._refused_step())

    async def _refused_step(self) -> None:
        before = await self.world.audit()
        # A trainer that crashed may be behind the run.
        version = (await self.world.state()).run.policy_version + 3
        request = broker_pb2.AckStepRequest(
            run_id=RUN, consumer_id="x", group_ids=["g1"], policy_version=version, owner=self.trainer.owner
        )
        try:
            await self.world.call("AckStep", request)
        except VersionConflictError:
            assert await self.world.audit() == before
        else:
            raise AssertionError("a step far ahead was taken")

    @rule()
    def checkpoint(self) -> None:
        self.trainer.save()

    @rule()
    def crash_the_trainer(self) -> None:
        self.run(self.trainer.crash())

    @rule()
    def lose_the_trainers_connection(self) -> None:
        self.do(lambda: self.trainer.pull(self.world.limits.groups_per_step))
        self.run(self.trainer.reconnect())
        self.do(lambda: self.trainer.pull(self.world.limits.groups_per_step))

    @rule(place=st.integers(0, 3), is_another_run=st.booleans())
    def a_replaced_trainer_wakes_up(self, place: int, is_another_run: bool) -> None:
        """Or one of another run of this id: whatever it says is refused and changes nothing."""
        if self.trainer.replaced:
            self.run(self._wake_up(self.trainer.replaced[place % len(self.trainer.replaced)], is_another_run))

    async def _wake_up(self, zombie: broker_pb2.RunOwner, is_another_run: bool) -> None:
        before, state = await self.world.audit(), await self.world.state()
        if zombie.epoch >= state.run.owner.epoch and not is_another_run:
            # The store lost the commit that replaced it, and its successor was not heard of since.
            return
        owner = broker_pb2.RunOwner()
        owner.CopyFrom(zombie)
        expected: type[PenstockError] = FencedError
        if is_another_run:
            owner.instance_id, owner.epoch, expected = "second", zombie.epoch + 100, OtherInstanceError
        setting, group_ids = self.world.setting, list(self.trainer.held) or ["g1"]
        opening = broker_pb2.OpenRunRequest(limits=setting.limits, policy=setting.policy, takes_over=is_another_run)
        for method, request in (
            ("OpenRun", opening),
            ("AckStep", broker_pb2.AckStepRequest(group_ids=group_ids, policy_version=before.policy_version + 1)),
            ("AckStep", broker_pb2.AckStepRequest(group_ids=group_ids, policy_version=before.policy_version)),
            ("DropGroups", broker_pb2.DropGroupsRequest(group_ids=group_ids, reason="unwanted")),
            ("CloseRun", broker_pb2.CloseRunRequest(drop_reason="run_complete")),
        ):
            request.run_id = RUN
            request.owner.CopyFrom(owner)
            try:
                await self.world.call(method, request)
            except expected:
                continue
            raise AssertionError(f"{method} of a replaced trainer was taken")
        assert await self.world.audit() == before

    @rule(place=st.integers(0, 7))
    def drop(self, place: int) -> None:
        names = self.trainer.memory.outstanding
        if names:
            self.run(self.trainer.drop([names[place % len(names)]]))

    # -- generators ----------------------------------------------------------------------------------------------------

    @rule(number=generators, slots=st.integers(0, SLOTS), is_current=st.booleans())
    def beat(self, number: int, slots: int, is_current: bool) -> None:
        generator = self.generators[number]
        if is_current or generator.version > self.trainer.memory.version:
            generator.version = self.trainer.memory.version
        self.do(lambda: generator.beat(slots=slots))

    @rule(
        number=generators,
        share=st.integers(1, 3),
        num_tokens=st.integers(1, 3),
        finish=st.sampled_from([STOP, STOP, UNFINISHED, ABORTED]),
    )
    def decode(self, number: int, share: int, num_tokens: int, finish: Any) -> None:
        """Go on with all, half or a third of the leases held."""
        self.run(self.generators[number].put(*self._chunks(number, share, num_tokens, finish)))

    @rule(
        number=generators,
        share=st.integers(1, 2),
        finish=st.sampled_from([STOP, UNFINISHED]),
        after_s=st.sampled_from([0.0, 0.3]),
    )
    def decode_and_die(self, number: int, share: int, finish: Any, after_s: float) -> None:
        """The answer to the last chunks is never heard."""
        chunks = self._chunks(number, share, 2, finish)
        if chunks:
            self.run(self.generators[number].put_and_die(*chunks, after_s=after_s))

    def _chunks(self, number: int, share: int, num_tokens: int, finish: Any) -> list[types_pb2.TokenChunk]:
        generator = self.generators[number]
        leases = list(generator.held)
        return [generator.decode(lease_id, num_tokens, finish) for lease_id in leases[: -(-len(leases) // share)]]

    @rule(number=generators, place=st.integers(0, 31))
    def repeat_a_chunk(self, number: int, place: int) -> None:
        """Something sent long ago arrives once more."""
        sent = self.generators[number].sent
        if sent:
            self.run(self.generators[number].put(sent[place % len(sent)], are_new=False))

    @rule(number=generators, fault=st.sampled_from(["gap", "future", "nan"]))
    def decode_wrongly(self, number: int, fault: str) -> None:
        self.run(self._decode_wrongly(self.generators[number], fault))

    async def _decode_wrongly(self, generator: ModelGenerator, fault: str) -> None:
        """A chunk that must be refused, and change nothing."""
        if not generator.held:
            return
        lease_id = next(iter(generator.held))
        held = generator.held[lease_id]
        good = generator.decode(lease_id, 1)
        held.offset -= 1
        bad = types_pb2.TokenChunk()
        bad.CopyFrom(good)
        if fault == "gap":
            bad.offset += 1
        elif fault == "nan":
            bad.logprobs = b"\0\0\xc0\x7f"
        else:
            bad.policy_versions.versions = (self.trainer.memory.version + 1).to_bytes(8, "little")
        before = await self.world.audit()
        errors = await generator.put(bad)
        del generator.sent[-1]
        assert [error.reason for error in errors] in (
            [["OFFSET_MISMATCH"], ["LEASE_LOST"], ["UNKNOWN_SAMPLE"]]
            if fault == "gap"
            else [["INVALID_FIELD"], ["OFFSET_MISMATCH"], ["LEASE_LOST"], ["UNKNOWN_SAMPLE"]]
        )
        after = await self.world.audit()
        assert (after.submitted, after.trained, after.dropped) == (before.submitted, before.trained, before.dropped)

    @rule(number=generators)
    def decode_after_losing_the_leases(self, number: int) -> None:
        """A generator that slept so long that others have its work by now goes on as if nothing had happened."""
        self.run(self._sleep_and_decode(self.generators[number], self.generators[1 - number]))

    async def _sleep_and_decode(self, sleeper: ModelGenerator, other: ModelGenerator) -> None:
        await sleeper.reconnect()
        held = dict(sleeper.held)
        await asyncio.sleep(self.world.limits.generation_lease_s + 1.0)
        await self.world.audit()
        await settle()
        other.version = self.trainer.memory.version
        other.beat(slots=4 * SLOTS)
        await settle()
        chunks = [sleeper.decode(lease_id, 1) for lease_id in held if lease_id in sleeper.held]
        state = await self.world.state()
        # Copied: the tokens may end a sample, and its lease with it.
        current = set(state.generation_leases.get(sleeper.generator_id, {}))
        # A token shard learns only from the next attempt that one was given up, and may take its tokens until then.
        current |= {chunk.lease_id for chunk in chunks if chunk.token_shard and not _is_of_present(state, chunk.key)}
        errors = await sleeper.put(*chunks)
        refused = {error.lease_id for error in errors}
        assert {chunk.lease_id for chunk in chunks} - current <= refused, "tokens of a lost lease were taken"

    @rule(number=generators, is_known=st.booleans())
    def lose_a_generator(self, number: int, is_known: bool) -> None:
        self.run(self.generators[number].die(is_known=is_known))

    @rule(number=generators)
    def lose_a_generators_connections(self, number: int) -> None:
        self.run(self.generators[number].reconnect())

    # -- reward workers ------------------------------------------------------------------------------------------------

    @rule(number=workers, slots=st.integers(1, SLOTS))
    def lease_scoring(self, number: int, slots: int) -> None:
        self.do(lambda: self.workers[number].ask(slots))

    @rule(number=workers, share=st.integers(1, 2), status=st.sampled_from(STATUSES), is_equal=st.booleans())
    def score(self, number: int, share: int, status: Any, is_equal: bool) -> None:
        worker = self.workers[number]
        leases = list(worker.held)[: -(-len(worker.held) // share)]
        results = [
            worker.judge(lease_id, STATUSES[0] if place else status, is_equal=is_equal)
            for place, lease_id in enumerate(leases)
        ]
        if results:
            self.run(worker.report(*results))

    @rule(number=workers, place=st.integers(0, 31))
    def repeat_a_score(self, number: int, place: int) -> None:
        sent = self.workers[number].sent
        if sent:
            self.run(self.workers[number].report(sent[place % len(sent)]))

    @rule(number=workers)
    def lose_a_worker(self, number: int) -> None:
        self.run(self.workers[number].die())

    # -- producers -----------------------------------------------------------------------------------------------------

    @rule(num_groups=st.integers(1, 2), lag=st.integers(0, 1), is_equal=st.booleans())
    def put(self, num_groups: int, lag: int, is_equal: bool) -> None:
        if self.world.setting.policy.needs_reference_logprobs:
            return
        num_groups = min(num_groups, self.world.limits.groups_per_step)
        version = max(0, self.trainer.memory.version - lag)
        self.run(self.producer.put(self.producer.make(num_groups, version, is_equal=is_equal)))

    @rule(place=st.integers(0, 7), is_renamed=st.booleans())
    def put_again(self, place: int, is_renamed: bool) -> None:
        """The same groups once more, in the same request or in another."""
        if self.producer.sent:
            self.run(self._put_again(self.producer.sent[place % len(self.producer.sent)], is_renamed))

    async def _put_again(self, request: broker_pb2.PutTrajectoriesRequest, is_renamed: bool) -> None:
        before = await self.world.audit()
        known = {group.prompt.group_id for group in types_pb2.TrajectoryGroups.FromString(request.groups).groups}
        again = broker_pb2.PutTrajectoriesRequest()
        again.CopyFrom(request)
        again.put_id += "-again" if is_renamed else ""
        is_all_known = known <= self.world.truth.submitted.keys()
        response = await self.producer.put(again)
        if is_all_known:
            assert (response.num_samples, len(response.errors)) == (0, 0)
            assert (await self.world.audit()).submitted == before.submitted

    @rule(num_steps=st.integers(1, 4), is_saved=st.booleans())
    def put_steps_and_crash(self, num_steps: int, is_saved: bool) -> None:
        """A run of agents is killed, perhaps further from its checkpoint than the broker retains, and resumed."""
        if self.world.setting.policy.needs_reference_logprobs:
            return
        if is_saved:
            self.trainer.save()
        self.run(self._put_steps_and_crash(num_steps))

    async def _put_steps_and_crash(self, num_steps: int) -> None:
        count = self.world.limits.groups_per_step
        for _ in range(num_steps):
            await self.producer.put(self.producer.make(count, self.trainer.memory.version, is_equal=False))
            await self.trainer.fill_and_step(least=count)
        await self.trainer.crash()

    @rule(accepts=st.booleans())
    def change_the_trainers_reading(self, accepts: bool) -> None:
        """A trainer that reads packed groups, or one that does not, takes the place of this one."""

        async def change() -> None:
            await self.trainer.reconnect()
            self.trainer.accepts_packed_groups = accepts

        self.run(change())

    # -- time ----------------------------------------------------------------------------------------------------------

    @rule(number=generators, steps=st.lists(jumps, min_size=1, max_size=3))
    def work_on_while_clocks_jump(self, number: int, steps: list[float]) -> None:
        """The wall clocks of brokers and store are stepped; who beats all the while keeps every lease."""
        self.run(self._beat_through(self.generators[number], steps))

    async def _beat_through(self, generator: ModelGenerator, steps: list[float]) -> None:
        before = set(generator.held)
        generator.load(self.trainer.memory.version, newest=self.trainer.memory.version)
        generator.beat(slots=SLOTS)
        await settle()
        fresh = {lease_id: held.lease.key for lease_id, held in generator.held.items() if lease_id not in before}
        for seconds in steps:
            self.world.store_time.offset_s += seconds
            for broker in self.world.brokers:
                broker.clock.offset_s -= seconds
            for _ in range(5):
                generator.beat(slots=0)
                await asyncio.sleep(self.world.limits.generation_lease_s / 5)
        state = await self.world.state()
        for lease_id, key in fresh.items():
            group = state.groups.get(key.group_id)
            sample = group.samples[key.sample_index] if group is not None else None
            if sample is not None and sample.attempt == key.attempt and not sample.num_moves:
                assert sample.lease_id == lease_id, "a lease expired whose holder never was silent"
                assert sample.state != broker_pb2.SAMPLE_STATE_QUEUED, "a lease expired whose holder never was silent"

    @rule()
    def close_and_open_again(self) -> None:
        self.run(self._close_and_open())

    async def _close_and_open(self) -> None:
        await self.world.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN))
        await settle()
        # A new process holds nothing: what the former one held is delivered to it again.
        self.trainer.held.clear()
        await self.trainer.take_over()

    @rule()
    def close_for_good_and_open_again(self) -> None:
        """The run ends with work in flight that nobody will train on; later it is gone on with."""
        self.run(self._close_for_good_and_open())

    async def _close_for_good_and_open(self) -> None:
        await self.world.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN, drop_reason="run_complete"))
        await settle()
        books = await self.world.audit()
        assert books.balanced, books
        assert not books.in_flight, books
        self.trainer.forget_in_flight()
        await self.trainer.take_over()

    # -- everybody -----------------------------------------------------------------------------------------------------

    @rule(num_steps=st.integers(1, 3), lag=st.integers(0, 1), status=st.sampled_from(STATUSES))
    def work(self, num_steps: int, lag: int, status: Any) -> None:
        """Without such stretches a random walk rarely gets a group as far as the trainer."""
        self.run(self._work(num_steps, lag=lag, status=status))

    @rule(num_steps=st.integers(1, 2), is_saved=st.booleans())
    def work_and_crash(self, num_steps: int, is_saved: bool) -> None:
        """Steps that the next trainer knows nothing of."""
        if is_saved:
            self.trainer.save()
        self.run(self._work(num_steps))
        self.run(self.trainer.crash())

    @rule(count=st.integers(1, 3), slots=st.integers(1, SLOTS))
    def begin(self, count: int, slots: int) -> None:
        """Prompts, and generators that take them."""
        self.run(self.trainer.submit(count))
        for generator in self.generators:
            generator.version = self.trainer.memory.version
        self.do(lambda: [generator.beat(slots=slots) for generator in self.generators])

    async def _work(self, num_steps: int, *, lag: int = 0, status: Any = STATUSES[0]) -> None:
        for _ in range(num_steps):
            await self.trainer.submit(2)
            await self._work_once(lag=lag, status=status)

    async def _work_once(self, *, lag: int = 0, status: Any = STATUSES[0]) -> None:
        limits = self.world.limits
        for generator in self.generators:
            generator.load(max(0, self.trainer.memory.version - lag), newest=self.trainer.memory.version)
            generator.beat(slots=SLOTS)
        await settle()
        for generator in self.generators:
            generator.beat(slots=SLOTS)
            await generator.put(*[generator.decode(lease_id, 2, STOP) for lease_id in list(generator.held)])
        for worker in self.workers:
            worker.ask(4 * SLOTS)
            await settle()
            results = [
                worker.judge(lease_id, status if place == 0 else STATUSES[0])
                for place, lease_id in enumerate(list(worker.held))
            ]
            if results:
                await worker.report(*results)
        self.trainer.pull(limits.groups_per_step)
        await settle()
        if len(self.trainer.held) >= limits.groups_per_step:
            await self.trainer.step()

    @invariant()
    def every_invariant_holds(self) -> None:
        if self.world is not None:
            self.run(check_all(self.world, self.trainer))

    def teardown(self) -> None:
        try:
            if self.world is not None:
                self.run(self._finish_everything())
        finally:
            self.leave()

    async def _finish_everything(self) -> None:
        """No endless wait: with everybody at work, all that was begun ends."""
        for broker in self.world.brokers:
            broker.run_registry.saturation.update(0.0, 10.0)
        await self.trainer.take_over()
        await self.trainer.submit_again()
        wanted = set(self.trainer.memory.outstanding)
        for _ in range(60):
            state = await self.world.state()
            live = {name for name in wanted if name in state.index.live}
            if not live:
                break
            await self.trainer.submit(2)
            await self._work_once()
        else:
            response = await self.world.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
            raise AssertionError(f"{live} never end: {response}")
        await check_all(self.world, self.trainer)
        await self._clean_up()

    async def _clean_up(self) -> None:
        """Token shards let go of what the run has given up, in their own time."""
        # Brokers with members attend those, too, to which no one has sent since a restart: `brokers.attendance`.
        for broker in self.world.brokers:
            for shard in range(1, self.world.setting.policy.token_shards + 1):
                await broker.run_registry.own_shards.attend(RUN, shard)
        for _ in range(MAX_TRIES):
            await asyncio.sleep(CLEAN_UP_S)
            if not shards_hold_more(self.world, await self.world.state()):
                return
        raise AssertionError("token shards still have chunks of groups that are gone")


def _is_of_present(state: RunState, key: types_pb2.SampleKey) -> bool:
    """Whether the run still works on this attempt of a sample."""
    group = state.groups.get(key.group_id)
    return group is not None and group.samples[key.sample_index].attempt == key.attempt
