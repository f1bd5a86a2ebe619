"""A policy whose critic is elsewhere: who steps when, and what is an error of the whole step."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from penstock.errors import DeadlineError, FencedError
from services.trainer.batches.packing import join
from services.trainer.compute.compute_thread import InterruptedComputeError
from services.trainer.model.backend import (
    LossTotals,
    NonFiniteGradientError,
    NonFiniteLossError,
    PartialStepError,
    StepMetrics,
)
from services.trainer.step.critic_apart import CriticApart
from tests.unit.trainer.builders import build_trajectory


class Policy:
    vocab_size, max_sequence_length, shares = 32, 16, (1.0, 1.0)

    def __init__(self, calls):
        self.calls, self.error = calls, None

    def forward_backward(self, *packs):
        self.calls.append("policy passes")
        if self.error is not None:
            raise self.error
        return LossTotals(num_tokens=2, sums={"loss": 3.0})

    def optimizer_step(self, *, divisor, is_last):
        self.calls.append("policy steps")
        if self.error is not None:
            raise self.error
        return StepMetrics(grad_norm=1.0, learning_rate=0.02, num_batches=1)

    def discard_gradients(self):
        self.calls.append("policy discards")


class Critic:
    def __init__(self, calls):
        self.calls, self.error = calls, None
        self.loss, self.gradient_norm, self.num_steps, self.found = 5.0, 1.0, 0, [np.ones(2, dtype=np.float32)]

    def values(self, packs):
        self.calls.append(f"values of {len(packs)}")
        return self.found

    def begin_gradient(self, packs):
        self.calls.append(f"critic begins {len(packs)}")
        return Future()

    def wait_for(self, loss):
        self.calls.append("critic ends")
        if self.error is not None:
            raise self.error
        return self.loss

    def give_up(self, loss):
        self.calls.append("critic gives up")

    def step(self, *, rate_factor, is_last):
        self.calls.append(f"critic steps at {rate_factor:g}{', the last' if is_last else ''}")
        if self.error is not None:
            raise self.error

    def discard(self):
        self.calls.append("critic discards")


@pytest.fixture
def calls():
    return []


@pytest.fixture
def policy(calls):
    return Policy(calls)


@pytest.fixture
def critic(calls):
    return Critic(calls)


@pytest.fixture
def backend(policy, critic):
    return CriticApart(policy, critic, peak_learning_rate=0.04)


@pytest.fixture
def pack():
    return join([build_trajectory(np.random.default_rng(0), num_prompt=2, num_completion=2)], [0])


def test_both_compute_at_once_and_the_critic_steps_after_the_policy_at_the_same_share_of_its_rate(backend, calls, pack):
    totals = backend.forward_backward(pack, None)
    assert totals.sums == {"loss": 3.0, "value_loss": 5.0}
    backend.optimizer_step(divisor=2, is_last=True)
    assert calls == [
        "critic begins 1",
        "policy passes",
        "critic ends",
        "policy steps",
        "critic steps at 0.5, the last",
    ]


def test_values_are_the_critics_and_empty_where_there_is_no_pack(backend, critic, pack):
    assert [each.size for each in backend.score(None, pack, quantity="values")] == [0, 2]
    critic.found = [np.array([1, np.nan], dtype=np.float32)]
    with pytest.raises(NonFiniteLossError, match="values"):
        backend.score(None, pack, quantity="values")


def test_a_critic_without_a_finite_gradient_keeps_the_policy_from_stepping(backend, critic, calls, pack):
    critic.loss = float("nan")
    with pytest.raises(NonFiniteLossError, match="the critic's loss of a pack is nan"):
        backend.forward_backward(pack, None)
    critic.gradient_norm = float("inf")
    with pytest.raises(NonFiniteGradientError, match="the critic's gradient norm is inf; no step was taken"):
        backend.optimizer_step(divisor=2)
    assert calls[-2:] == ["policy discards", "critic discards"]
    assert "policy steps" not in calls


def test_a_policy_that_cannot_go_on_keeps_the_critic_from_stepping(backend, policy, calls, pack):
    policy.error = NonFiniteLossError("the loss is nan")
    with pytest.raises(NonFiniteLossError):
        backend.forward_backward(pack, None)
    assert calls[-1] == "critic gives up"
    policy.error = NonFiniteGradientError("the norm is inf")
    with pytest.raises(NonFiniteGradientError):
        backend.optimizer_step(divisor=2)
    assert not any(call.startswith("critic steps") for call in calls)


@pytest.mark.parametrize("error", [InterruptedComputeError("stopped"), DeadlineError("away for too long")])
def test_a_critic_that_does_not_answer_ends_a_step_with_a_way_back_only_before_anyone_stepped(
    backend, critic, pack, error
):
    critic.error = error
    with pytest.raises(type(error)):
        backend.forward_backward(pack, None)
    with pytest.raises(PartialStepError, match="its critic could not follow"):
        backend.optimizer_step(divisor=2)
    critic.num_steps = 1
    with pytest.raises(PartialStepError):
        backend.forward_backward(pack, None)


def test_a_fenced_trainer_hears_so_at_any_time(backend, critic):
    critic.error = FencedError("a trainer of epoch 2 has this critic")
    with pytest.raises(FencedError):
        backend.optimizer_step(divisor=2)
