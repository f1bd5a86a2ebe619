"""How long `penstock plan` searches where no budget is named."""

from __future__ import annotations

import pytest

from console.plan.plan_command import default_budget_s


@pytest.mark.parametrize(
    ("num_gpus", "budget_s"), [(1, 14.0), (64, 14.0), (256, 29.5), (1024, 45.0), (1_000_000, 45.0)]
)
def test_the_budget_grows_with_each_doubling_of_gpus(num_gpus: int, budget_s: float) -> None:
    assert default_budget_s(num_gpus) == pytest.approx(budget_s)
