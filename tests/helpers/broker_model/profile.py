"""How much the state machine tries: a fixed sequence in CI, longer in the grids, and another one each time for a night.

    PENSTOCK_HYPOTHESIS=long python -m pytest tests/unit/broker/test_invariants.py \
        tests/integration/broker/test_invariants.py

A long run prints the seed of what failed (`@seed(...)`), which repeats it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.helpers.broker_model.machine import BrokerMachine
from tests.helpers.broker_model.process import Backing
from tests.helpers.broker_model.session_machine import SessionMachine
from tests.helpers.broker_model.world_machine import WorldMachine

IS_LONG = os.environ.get("PENSTOCK_HYPOTHESIS") == "long"
LONG_FACTOR = 100
TIMEOUT_S = 3600.0 if IS_LONG else 300.0


def check_invariants(make_backing: Callable[[], Backing], *, max_examples: int) -> None:
    """Run the machine on stores that `make_backing` makes, each empty."""
    _run(BrokerMachine, make_backing, max_examples)


def check_sessions(make_backing: Callable[[], Backing], *, max_examples: int) -> None:
    """The same with the machine of agents' sessions."""
    _run(SessionMachine, make_backing, max_examples)


def _run(machine: type[WorldMachine], make_backing: Callable[[], Backing], max_examples: int) -> None:
    run_state_machine_as_test(
        lambda: machine(make_backing),
        settings=settings(
            max_examples=max_examples * (LONG_FACTOR if IS_LONG else 1),
            stateful_step_count=60 if IS_LONG else 30,
            derandomize=not IS_LONG,
            print_blob=True,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
        ),
    )
