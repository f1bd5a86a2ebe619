"""A run that is being stopped begins no further forward pass, but takes the optimiser steps of a batch to their end."""

import pytest

from services.trainer.algorithms.base import Normalization
from services.trainer.algorithms.dr_grpo import DR_GRPO
from services.trainer.algorithms.ppo import PPO
from services.trainer.compute.compute_thread import Interrupt, InterruptedComputeError
from services.trainer.step.step import StepClosedError, TrainingStep
from services.trainer.step.step_settings import StepSettings
from tests.unit.trainer.builders import RecordingBackend, build_group

GROUPS = [build_group(name, [0.0, 1.0]) for name in "abc"]


class StoppingBackend(RecordingBackend):
    """Sets `interrupt` in the first call of `method`; counts all of its passes."""

    def __init__(self, interrupt, method):
        super().__init__()
        self.num_passes = 0
        self._interrupt, self._method = interrupt, method

    def _note(self, method):
        self.num_passes += method != "optimizer_step"
        if method == self._method:
            self._interrupt.set()

    def forward_backward(self, *packs):
        self._note("forward_backward")
        return super().forward_backward(*packs)

    def score_of(self, pack, quantity):
        self._note(quantity)
        return super().score_of(pack, quantity)

    def optimizer_step(self, *, divisor, is_last=True):
        self._note("optimizer_step")
        return super().optimizer_step(divisor=divisor)


def open_step(backend, interrupt, **changes):
    settings = {"policy_version": 0, "max_staleness": 0, "max_pack_tokens": 8, "algorithm": DR_GRPO}
    settings |= {"normalization": Normalization.TOKENS, "skip_zero_advantages": False}
    return TrainingStep(backend, StepSettings(**settings | changes), check=interrupt.check)


EACH_PASS = [
    ("forward_backward", {}),
    ("logprobs", {"num_minibatches": 2, "needs_proximal": True}),
    ("reference_logprobs", {"num_minibatches": 2, "needs_reference": True}),
    ("values", {"algorithm": PPO, "reward_kl_coefficient": 0.1}),
]


@pytest.mark.parametrize(("method", "changes"), EACH_PASS, ids=[method for method, _ in EACH_PASS])
def test_no_pass_begins_after_an_interrupt(method, changes):
    interrupt = Interrupt()
    backend = StoppingBackend(interrupt, method)
    step = open_step(backend, interrupt, **changes)
    with pytest.raises(InterruptedComputeError):
        step.add_groups(GROUPS)
    assert (backend.num_passes, backend.steps, backend.num_discards) == (1, [], 1)
    with pytest.raises(StepClosedError):
        step.finish()


def test_the_last_passes_of_a_batch_are_called_off_too():
    interrupt = Interrupt()
    backend = StoppingBackend(interrupt, None)
    step = open_step(backend, interrupt, num_minibatches=3)
    step.add_groups(GROUPS)
    interrupt.set()
    with pytest.raises(InterruptedComputeError):
        step.finish()
    assert (backend.num_passes, backend.steps) == (0, [])


def test_an_interrupt_between_the_optimiser_steps_of_a_batch_waits_for_the_last():
    interrupt = Interrupt()
    backend = StoppingBackend(interrupt, "optimizer_step")
    step = open_step(backend, interrupt, num_minibatches=3)
    step.add_groups(GROUPS)
    assert step.finish().num_groups == 3
    assert len(backend.steps) == 3
    with pytest.raises(InterruptedComputeError):
        open_step(backend, interrupt).add_groups(GROUPS)
