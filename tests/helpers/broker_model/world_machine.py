"""What all state machines of a broker share: one example's world, and what may happen to brokers, store and time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.helpers.broker_model.process import Backing
from tests.helpers.broker_model.world import World, settle
from tests.helpers.virtual_time import VirtualLoop

brokers = st.integers(0, 1)
jumps = st.sampled_from([-3600.0, -60.0, -1.5, 60.0, 3600.0])
"""Seconds by which a wall clock may be stepped."""


class WorldMachine(RuleBasedStateMachine):
    """One example; `make_backing` gives it an empty store."""

    def __init__(self, make_backing: Callable[[], Backing]) -> None:
        super().__init__()
        self._make_backing = make_backing
        self.loop = VirtualLoop()
        self.world: World | None = None
        # Ids in order instead of at random, so that an example that failed fails again.
        numbers = itertools.count()
        self.ids = mock.patch("secrets.token_hex", lambda size=8: f"{next(numbers):0{2 * size}x}")
        self.ids.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Let the world go on until `work` is done."""
        return self.loop.run_until_complete(work)

    def do(self, action: Callable[[], object]) -> None:
        """Do something at once, and let its consequences happen."""

        async def work() -> None:
            action()
            await settle()

        self.run(work())

    @rule(number=brokers)
    def restart_a_broker(self, number: int) -> None:
        self.run(self.world.restart(number))

    @rule(number=brokers)
    def collect_garbage_of_a_broker(self, number: int) -> None:
        self.world.broker(number).collect()

    @rule(number=brokers, fault=st.sampled_from(["before", "after"]))
    def fail_the_next_commit(self, number: int, fault: Any) -> None:
        self.world.broker(number).store.faults.append(fault)

    @rule()
    def save_the_store(self) -> None:
        self.world.save_store()

    @rule()
    def lose_the_last_commits(self) -> None:
        self.world.lose_commits()
        self.run(settle())

    @rule(seconds=st.sampled_from([0.5, 1.5, 2.5, 4.0, 70.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(number=brokers, seconds=jumps)
    def step_a_brokers_clock(self, number: int, seconds: float) -> None:
        self.world.broker(number).clock.offset_s += seconds

    @rule(number=brokers, is_starved=st.booleans())
    def starve_a_broker(self, number: int, is_starved: bool) -> None:
        """It has no time to spare, or has some again; leases wait for it."""
        self.world.broker(number).run_registry.saturation.update(float(is_starved), 10.0)

    def leave(self) -> None:
        """End everything."""
        self.run(self._leave())
        self.loop.shut_down()
        self.ids.stop()

    async def _leave(self) -> None:
        if self.world is not None:
            for broker in self.world.brokers:
                await broker.kill()
            await self.world.backing.store.close()
