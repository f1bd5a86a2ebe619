"""The seven invariants under any order of events, on the reference store; see `tests.helpers.broker_model`."""

from __future__ import annotations

import pytest

from tests.helpers.broker_model.process import MemoryBacking
from tests.helpers.broker_model.profile import TIMEOUT_S, check_invariants, check_sessions


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("max_examples", [25, pytest.param(80, marks=pytest.mark.grid)])
def test_the_invariants_hold_whatever_happens(max_examples: int) -> None:
    check_invariants(MemoryBacking, max_examples=max_examples)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("max_examples", [20, pytest.param(400, marks=pytest.mark.grid)])
def test_sessions_of_agents_are_kept_whatever_happens(max_examples: int) -> None:
    check_sessions(MemoryBacking, max_examples=max_examples)
