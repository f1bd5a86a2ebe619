"""What dispatch makes of a run's records."""

from __future__ import annotations

import pytest

from services.broker import submission
from services.broker.fleet import num_to_come
from tests.helpers.broker import evaluation
from tests.unit.broker.builders import acknowledge, deliver, make_ready, open_state, submit


@pytest.mark.parametrize(("num_submitted", "num_lacking"), [(0, 0), (1, 3), (4, 0), (5, 3), (8, 0)])
def test_a_step_that_was_begun_lacks_the_rest_of_its_prompts(num_submitted: int, num_lacking: int) -> None:
    state = open_state(groups_per_step=4)
    submit(state, *"abcdefgh"[:num_submitted])
    assert num_to_come(state) == num_lacking


def test_evaluations_and_trained_groups_are_of_no_step_that_was_begun() -> None:
    state = open_state(groups_per_step=2)
    make_ready(state, "a", "b")
    assert set(deliver(state)) == {"a", "b"}
    acknowledge(state, ["a", "b"], 1)
    submission.submit(state, [evaluation("e")], retired=(), now_s=1.0)
    assert num_to_come(state) == 0
    submit(state, "c")
    assert num_to_come(state) == 1
