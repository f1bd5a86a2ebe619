"""The state machine of agents' sessions: everything that endpoints, their brokers and a store may do, in any order.

After every rule the broker has what the ledger allows, and the audit balances; at the end a new endpoint finds every
session that is still open, with all of its turns, and ends it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from penstock.errors import RunClosedError
from penstock.v1 import broker_pb2
from services.broker.state.other_records import session_name
from tests.helpers.broker_model.endpoint import SILENT_S, Local, ModelEndpoint, Process
from tests.helpers.broker_model.session_ledger import PUT
from tests.helpers.broker_model.trainer import ModelTrainer
from tests.helpers.broker_model.world import MAX_TRIES, RUN, Setting, World, settle
from tests.helpers.broker_model.world_machine import WorldMachine
from tests.helpers.brokers.broker import duration

NUM_ENDPOINTS = 3
NAMES = ("s0", "s1", "s2", "s3")
LEASE_S = 6.0
LONGEST_S = 90
"""Until brokers that were killed are waited for no more, and the run's clock has gone on without a gap for long."""
SETTING = Setting(
    limits=broker_pb2.RunLimits(
        groups_per_step=1, group_size=2, max_completion_tokens=24, generation_lease=duration(LEASE_S)
    ),
    policy=broker_pb2.RunPolicy(),
)

endpoints = st.integers(0, NUM_ENDPOINTS - 1)
names = st.sampled_from(NAMES)
deaths = st.sampled_from([None, None, None, 0.0, 0.3])
"""Seconds after which a process dies that waits for an answer."""
keeps = st.sampled_from([600.0, 600.0, 30.0])


class SessionMachine(WorldMachine):
    """One example."""

    @initialize()
    def open(self) -> None:
        self.run(self._open())

    async def _open(self) -> None:
        world = World(self._make_backing(), self.loop, SETTING)
        self.trainer = ModelTrainer(world)
        self.endpoints = [ModelEndpoint(world, number) for number in range(NUM_ENDPOINTS)]
        await self.trainer.take_over()
        self.world = world
        await self._beat()
        # Few sessions, and some from the start: otherwise endpoints rarely meet.
        for number, name in enumerate(NAMES[:3]):
            await self._answer(self.endpoints[number // 2], name, 600.0, None, 1)

    # -- endpoints -----------------------------------------------------------------------------------------------------

    @rule(number=endpoints, name=names, keep_s=keeps, dies_after_s=deaths, count=st.integers(1, 3))
    def answer(self, number: int, name: str, keep_s: float, dies_after_s: float | None, count: int) -> None:
        """A session's next turns, stored one by one, at the endpoint that happens to be asked."""
        self.run(self._answer(self.endpoints[number], name, keep_s, dies_after_s, count))

    async def _answer(
        self, endpoint: ModelEndpoint, name: str, keep_s: float, dies_after_s: float | None, count: int
    ) -> None:
        process = endpoint.process
        for _ in range(count):
            if name not in process.sessions:
                await endpoint.take(process, self._processes(), session_id=name)
            local = process.sessions.setdefault(name, _new(name))
            local.turns.append(self.world.serials.next())
            await self._beat()
            await endpoint.store(process, name, keep_s=keep_s, dies_after_s=dies_after_s)
            if process is not endpoint.process or name not in process.sessions:
                return

    @rule(number=endpoints, name=names, after_s=st.sampled_from([0.0, 0.05, 0.3]), gives_up=st.booleans())
    def cancel_a_request(self, number: int, name: str, after_s: float, gives_up: bool) -> None:
        """A client hangs up while its answer is stored; that of a session may be the only one."""
        self.run(self._cancel(self.endpoints[number], name, after_s, gives_up))

    async def _cancel(self, endpoint: ModelEndpoint, name: str, after_s: float, gives_up: bool) -> None:
        process = endpoint.process
        if name not in process.sessions:
            await endpoint.take(process, self._processes(), session_id=name)
        process.sessions.setdefault(name, _new(name)).turns.append(self.world.serials.next())
        await self._beat()
        storing = asyncio.ensure_future(endpoint.store(process, name))
        await asyncio.sleep(after_s)
        storing.cancel()
        await asyncio.wait([storing])
        if not storing.cancelled():
            storing.result()
        # That its client did not get the answer is stored, too, before anyone gives it up.
        if name in process.sessions:
            await endpoint.store(process, name)
        if gives_up:
            await endpoint.end(process, [name], "abandoned")

    @rule(number=endpoints, name=names, leaves_out=st.integers(-1, 2))
    def store_again(self, number: int, name: str, leaves_out: int) -> None:
        """As after a lost answer, with turns that are stored; or without some that are not."""
        endpoint = self.endpoints[number]
        if name in endpoint.process.sessions:
            self.run(endpoint.store(endpoint.process, name, leaves_out=leaves_out))

    @rule(number=endpoints, name=names, reward=st.sampled_from([0.0, 1.0]))
    def reward(self, number: int, name: str, reward: float) -> None:
        endpoint = self.endpoints[number]
        if name in endpoint.process.sessions:
            endpoint.process.sessions[name].reward = reward
            self.run(endpoint.store(endpoint.process, name))

    @rule(number=endpoints, asks=st.sampled_from(["session", "task", "idle"]), name=names, dies_after_s=deaths)
    def take_over(self, number: int, asks: str, name: str, dies_after_s: float | None) -> None:
        asked: dict[str, Any] = {"session_id": name} if asks == "session" else {"task": _new(name).task}
        if asks == "idle":
            asked = {"idle_s": 5.0}
        endpoint = self.endpoints[number]
        self.run(endpoint.take(endpoint.process, self._processes(), dies_after_s=dies_after_s, **asked))

    @rule(number=endpoints, of=endpoints)
    def take_over_while_the_owner_comes_back(self, number: int, of: int) -> None:
        """Its connection breaks, and another endpoint asks before it has said anything but hello."""
        self.run(self._take_while_back(self.endpoints[number], self.endpoints[of]))

    async def _take_while_back(self, taker: ModelEndpoint, owner: ModelEndpoint) -> None:
        if taker is owner or not owner.process.sessions:
            return
        # One that drains goes on draining: it ends when its sessions do.
        is_draining = owner.process.is_draining
        owner.beat(is_draining=is_draining)
        await settle()
        owner.note_heard()
        await owner.generator.reconnect()
        owner.beat(is_draining=is_draining)
        await taker.take(taker.process, self._processes(), session_id=next(iter(owner.process.sessions)))

    @rule(number=endpoints)
    def ask_which_have_moved(self, number: int) -> None:
        endpoint = self.endpoints[number]
        self.run(endpoint.check(endpoint.process, [*NAMES, "never"]))

    @rule(
        number=endpoints,
        some=st.sets(names, min_size=1, max_size=3),
        outcome=st.sampled_from([PUT, "idle", "abandoned"]),
        dies_after_s=deaths,
    )
    def end(self, number: int, some: set[str], outcome: str, dies_after_s: float | None) -> None:
        endpoint = self.endpoints[number]
        self.run(endpoint.end(endpoint.process, sorted(some), outcome, dies_after_s=dies_after_s))

    @rule(number=endpoints, name=names, does=st.sampled_from(["store", "end", "check"]))
    def a_former_process_wakes_up(self, number: int, name: str, does: str) -> None:
        """It takes what it has for its own, until it hears otherwise."""
        endpoint = self.endpoints[number]
        if endpoint.former:
            self.run(self._wake_up(endpoint, endpoint.former[-1], name, does))

    async def _wake_up(self, endpoint: ModelEndpoint, former: Process, name: str, does: str) -> None:
        if does == "store" and name in former.sessions:
            former.sessions[name].turns.append(self.world.serials.next())
            await endpoint.store(former, name)
        elif does == "end":
            await endpoint.end(former, [name], "idle")
        else:
            await endpoint.check(former, list(NAMES))

    @rule(number=endpoints, is_known=st.booleans())
    def lose_an_endpoint(self, number: int, is_known: bool) -> None:
        self.run(self.endpoints[number].die(is_known=is_known))

    @rule(number=endpoints, by=endpoints)
    def start_an_endpoint_in_the_place_of_another(self, number: int, by: int) -> None:
        """What the former one had is free once its successor is connected, for whoever is asked first."""
        self.run(self._replace(self.endpoints[number], self.endpoints[by]))

    async def _replace(self, endpoint: ModelEndpoint, taker: ModelEndpoint) -> None:
        await endpoint.see()
        former = endpoint.process.generator_id
        free = [name for name, kept in endpoint.ledger.kept.items() if kept.owner == former]
        await endpoint.die(is_known=True)
        for _ in range(MAX_TRIES):
            endpoint.beat()
            await settle()
            endpoint.note_heard()
            await endpoint.see()
            if all(kept.owner != former for kept in endpoint.ledger.kept.values()):
                if free:
                    await taker.take(taker.process, self._processes(), session_id=free[0])
                return
        raise AssertionError(f"sessions of {former} are not free: {endpoint.ledger.kept}")

    @rule(number=endpoints, by=endpoints, name=names)
    def ask_for_the_session_of_a_new_process(self, number: int, by: int, name: str) -> None:
        """It has just begun, and not every broker has heard of it."""
        self.run(self._ask_early(self.endpoints[number], self.endpoints[by], name))

    async def _ask_early(self, endpoint: ModelEndpoint, taker: ModelEndpoint, name: str) -> None:
        await endpoint.die(is_known=False)
        await self._answer(endpoint, name, 600.0, None, 1)
        await taker.take(taker.process, self._processes(), session_id=name)

    @rule(number=endpoints)
    def drain(self, number: int) -> None:
        self.do(lambda: self.endpoints[number].beat(is_draining=True))

    @rule(number=endpoints)
    def lose_an_endpoints_connection(self, number: int) -> None:
        self.run(self.endpoints[number].generator.reconnect())

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0]))
    def go_on(self, seconds: float) -> None:
        """All are heard for a while."""
        self.run(self._go_on(seconds))

    async def _go_on(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            await self._beat()
            await asyncio.sleep(0.2)

    async def _beat(self) -> None:
        for endpoint in self.endpoints:
            endpoint.beat(is_draining=endpoint.process.is_draining)
        await settle()
        for endpoint in self.endpoints:
            endpoint.note_heard()

    def _processes(self) -> list[Process]:
        return [process for endpoint in self.endpoints for process in (*endpoint.former, endpoint.process)]

    @rule(seconds=st.sampled_from([20.0, 70.0]))
    def lose_all_brokers_for_a_while(self, seconds: float) -> None:
        """Nobody can store anything meanwhile, and nothing expires for that."""
        self.run(self._pause(seconds))

    async def _pause(self, seconds: float) -> None:
        for broker in self.world.brokers:
            await broker.kill()
        await asyncio.sleep(seconds)
        for number in range(len(self.world.brokers)):
            await self.world.restart(number)
        await self._beat()

    # -- the run -------------------------------------------------------------------------------------------------------

    @rule(is_for_good=st.booleans())
    def close_and_open_again(self, is_for_good: bool) -> None:
        self.run(self._close_and_open(is_for_good))

    async def _close_and_open(self, is_for_good: bool) -> None:
        endpoint, reason = self.endpoints[0], "run_complete" if is_for_good else ""
        await endpoint.see()
        await self.world.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN, drop_reason=reason))
        if is_for_good:
            endpoint.ledger.end_all(reason)
        endpoint.process.sessions["late"] = Local(task="t", is_named=True, turns=[self.world.serials.next()])
        try:
            await endpoint.store(endpoint.process, "late")
        except RunClosedError:
            del endpoint.process.sessions["late"]
        else:
            raise AssertionError("a closed run took a session")
        await settle()
        await self.trainer.take_over()

    # -- what holds ----------------------------------------------------------------------------------------------------

    @invariant()
    def the_broker_has_what_the_ledger_allows(self) -> None:
        if self.world is not None:
            self.run(self._check())

    async def _check(self) -> None:
        assert not self.world.crashes, self.world.crashes
        await settle()
        await self.endpoints[0].see()
        state, ledger = await self.world.state(), self.world.truth.sessions
        books = await self.world.audit()
        assert books.balanced, books
        found = books.sessions
        ended = dict(found.dropped) | ({PUT: found.put} if found.put else {})
        assert (found.opened, found.open, ended) == (ledger.num_opened, len(ledger.kept), dict(ledger.ended)), books
        _prompts, samples = self.world.backing.payload(RUN)
        assert samples == {(session_name(name), 0) for name in state.sessions}, "turns of sessions that are gone"

    def teardown(self) -> None:
        try:
            if self.world is not None:
                self.run(self._finish())
        finally:
            self.leave()

    async def _finish(self) -> None:
        """All endpoints are gone for good: a new one finds what they had."""
        for broker in self.world.brokers:
            broker.store.faults.clear()
            broker.run_registry.saturation.update(0.0, 10.0)
        for endpoint in self.endpoints:
            await endpoint.die(is_known=False)
        heir = ModelEndpoint(self.world, NUM_ENDPOINTS)
        silent_since_s = self.world.store_time.read().now_s
        for _ in range(LONGEST_S):
            heir.beat()
            await asyncio.sleep(1.0)
            clock = self.world.store_time.read()
            if clock.now_s - max(silent_since_s, clock.unbroken_since_s) > SILENT_S:
                break
        await heir.take(heir.process, [*self._processes(), heir.process], idle_s=0.0)
        await heir.see()
        assert heir.process.sessions.keys() == heir.ledger.kept.keys(), "a session is lost with its endpoint"
        await heir.end(heir.process, sorted(heir.process.sessions), PUT)
        assert not heir.ledger.kept
        await self._check()


def _new(name: str) -> Local:
    """A session that begins; the last two have no siblings, one of them for want of a name for its task."""
    number = NAMES.index(name)
    return Local(task=f"t{number // 2}", is_named=number < 3)
