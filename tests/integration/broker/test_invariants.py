"""The seven invariants under any order of events, on a real Redis; see `tests.helpers.broker_model`."""

from __future__ import annotations

import pytest

from tests.helpers.broker_model.process import RedisBacking
from tests.helpers.broker_model.profile import TIMEOUT_S, check_invariants, check_sessions
from tests.helpers.stores.stores import RedisServers


@pytest.mark.flaky(reruns=0)
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("max_examples", [8, pytest.param(25, marks=pytest.mark.grid)])
def test_the_invariants_hold_on_redis_whatever_happens(servers: RedisServers, max_examples: int) -> None:
    check_invariants(lambda: RedisBacking(servers.emptied("redis")), max_examples=max_examples)


@pytest.mark.grid
@pytest.mark.flaky(reruns=0)
@pytest.mark.timeout(TIMEOUT_S)
def test_sessions_of_agents_are_kept_on_redis_whatever_happens(servers: RedisServers) -> None:
    check_sessions(lambda: RedisBacking(servers.emptied("redis")), max_examples=25)
