"""A training step: what it admits, what it reports, and that it leaves nothing behind when it fails."""

import numpy as np
import pytest

from services.trainer.algorithms.base import Normalization
from services.trainer.algorithms.dapo import DAPO
from services.trainer.algorithms.dr_grpo import DR_GRPO
from services.trainer.algorithms.reinforce_plus_plus import REINFORCE_PLUS_PLUS
from services.trainer.model.backend import NonFiniteGradientError, NonFiniteLossError, StepMetrics
from services.trainer.step.sample_filter import SkipReason
from services.trainer.step.step import EmptyStepError, SkippedSample, StepClosedError, TrainingStep
from services.trainer.step.step_settings import StepSettings
from tests.unit.trainer.builders import VOCAB_SIZE, RecordingBackend, build_group, build_sample


def open_step(backend=None, **changes):
    backend = backend or RecordingBackend()
    settings = {"policy_version": 3, "max_staleness": 3, "max_pack_tokens": 64}
    settings |= {"algorithm": DAPO, "normalization": Normalization.TOKENS} | changes
    return backend, TrainingStep(backend, StepSettings(**settings))


def test_a_step_divides_by_the_loss_tokens_of_all_microbatches():
    backend, step = open_step()
    first = step.add_groups([build_group("a", [0.0, 1.0]), build_group("b", [1.0, 0.0])])
    second = step.add_groups([build_group("c", [0.0, 1.0, 1.0])])
    report = step.finish()
    assert (first, second) == ((), ())
    assert backend.steps == [4 + 5 + 4 + 5 + 4 + 5 + 6]
    assert report.num_loss_tokens == report.num_completion_tokens == 33
    assert (report.num_groups, report.num_samples) == (3, 7)
    assert report.num_forward_tokens == 33 + 21
    assert report.loss_metrics == {"loss": 2.0}
    assert (report.reward_mean, report.reward_std) == pytest.approx((4 / 7, np.sqrt(4 / 7 * 3 / 7)))
    assert report.optimizer == StepMetrics(grad_norm=1.0, learning_rate=0.1, num_batches=1)
    assert (report.num_replayed_samples, report.replayed_staleness_max) == (0, 0)
    assert report.max_completion_tokens == 6


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_gaps_to_the_engine_are_kept_of_the_samples_that_went_through_the_model(num_minibatches):
    groups = [build_group("a", [0.0, 1.0]), build_group("b", [1.0, 1.0]), build_group("c", [1.0, 0.0, 0.0])]
    _, step = open_step(keeps_gaps=True, num_minibatches=num_minibatches)
    step.add_groups(groups[:2])
    step.add_groups(groups[2:])
    gaps = step.finish().gaps
    assert sorted(gaps) == [("a", 0), ("a", 1), ("c", 0), ("c", 1), ("c", 2)]
    for sample in (*groups[0], *groups[2]):
        of_sample = gaps[sample.group_id, sample.sample_index]
        np.testing.assert_allclose(of_sample, -sample.completion_token_ids / 100, rtol=1e-3)
    _, step = open_step(num_minibatches=num_minibatches)
    step.add_groups(groups)
    assert step.finish().gaps == {}


def test_advantages_are_those_of_the_samples_own_group():
    backend, step = open_step(algorithm=DR_GRPO)
    step.add_groups([build_group("a", [0.0, 1.0]), build_group("b", [10.0, 14.0])])
    step.finish()
    found = {
        float(pack.advantages[pack.target_segments == segment][0])
        for pack in backend.packs
        for segment in range(len(pack.segment_lengths))
    }
    assert found == {-0.5, 0.5, -2.0, 2.0}


@pytest.mark.parametrize(
    ("normalization", "divisor"),
    [
        (Normalization.TOKENS, 9),
        (Normalization.SAMPLES, 2),
        (Normalization.SEQUENCES, 2),
        (Normalization.MAX_TOKENS, 2),
    ],
)
def test_a_step_divides_as_the_algorithm_says(normalization, divisor):
    backend, step = open_step(normalization=normalization)
    step.add_groups([build_group("a", [0.0, 1.0])])
    step.finish()
    assert backend.steps == [divisor]


def test_credits_of_the_whole_step_wait_for_its_last_group():
    backend, step = open_step(algorithm=REINFORCE_PLUS_PLUS)
    first = step.add_groups([build_group("a", [0.0, 0.0])])
    second = step.add_groups([build_group("b", [1.0, 1.0])])
    assert (first, second) == ((), ())
    assert backend.packs == []
    report = step.finish()
    assert (report.num_samples, report.num_groups, backend.steps) == (4, 2, [18])
    found = [float(value) for pack in backend.packs for value in pack.advantages]
    assert sorted(set(found)) == pytest.approx([-1.0, 1.0], abs=1e-5)


def test_answers_near_the_limit_lose_reward_where_that_is_asked_for():
    backend, step = open_step(algorithm=DR_GRPO, max_new_tokens=6, overlong_buffer_tokens=2)
    step.add_groups([[build_sample(index=index, reward=1.0, num_tokens=num) for index, num in enumerate((4, 5, 6))]])
    assert step.finish().reward_mean == 1.0
    assert sorted({float(value) for pack in backend.packs for value in pack.advantages}) == [-0.5, 0.5]


def test_groups_of_equal_rewards_count_as_trained_without_a_forward_pass():
    backend, step = open_step()
    step.add_groups([build_group("a", [1.0, 1.0]), build_group("b", [0.0, 1.0])])
    report = step.finish()
    assert report.num_samples == 4
    assert report.num_zero_advantage_groups == 1
    assert sum(pack.num_tokens for pack in backend.packs) == 4 + 5 + 6
    assert backend.steps == [18]


def test_groups_of_equal_rewards_go_through_the_model_when_the_loss_needs_them():
    backend, step = open_step(skip_zero_advantages=False)
    step.add_groups([build_group("a", [1.0, 1.0])])
    step.finish()
    assert sum(pack.num_loss_tokens for pack in backend.packs) == 9


def test_a_step_of_only_zero_advantages_still_steps_with_its_token_count():
    backend, step = open_step()
    step.add_groups([build_group("a", [1.0, 1.0])])
    assert step.finish().loss_metrics == {}
    assert backend.packs == []
    assert backend.steps == [9]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward": None}, SkipReason.UNSCORED),
        ({"version": -1}, SkipReason.STALE),
        ({"num_tokens": 30}, SkipReason.TOO_LONG),
        ({"num_tokens": 0}, SkipReason.MALFORMED),
        ({"reward": float("nan")}, SkipReason.MALFORMED),
        ({"group_id": "other"}, SkipReason.MALFORMED),
        ({"completion_token_ids": np.full(4, VOCAB_SIZE, dtype=np.int32)}, SkipReason.MALFORMED),
        ({"completion_token_ids": np.full(4, -1, dtype=np.int32)}, SkipReason.MALFORMED),
        ({"prompt_token_ids": np.array([], dtype=np.int32)}, SkipReason.MALFORMED),
        ({"behavior_logprobs": np.full(4, np.nan, dtype=np.float32)}, SkipReason.MALFORMED),
        ({"behavior_logprobs": np.zeros(5, dtype=np.float32)}, SkipReason.MALFORMED),
        ({"policy_versions": np.zeros(3, dtype=np.int64)}, SkipReason.MALFORMED),
        ({"loss_mask": np.ones(3, dtype=np.bool_)}, SkipReason.MALFORMED),
        ({"advantages": np.full(4, np.inf, dtype=np.float32)}, SkipReason.MALFORMED),
        ({"index": 0}, SkipReason.DUPLICATE),
    ],
)
def test_an_unusable_sample_is_named_with_its_reason_and_its_siblings_are_trained(changes, reason):
    backend, step = open_step()
    odd = build_sample(**({"group_id": "a", "index": 2} | changes))
    left_out = step.add_groups([[*build_group("a", [0.0, 1.0]), odd]])
    assert [skipped.reason for skipped in left_out] == [reason]
    report = step.finish()
    assert (report.num_samples, report.skipped) == (2, left_out)
    assert backend.steps == [9]


def test_the_staleness_bound_looks_at_the_oldest_token():
    versions = np.array([2, 2, 5, 5], dtype=np.int64)
    sample = build_sample(group_id="a", index=1, reward=0.0, policy_versions=versions)
    _, at_bound = open_step(policy_version=5, max_staleness=3)
    assert at_bound.add_groups([[build_sample(group_id="a", version=5), sample]]) == ()
    report = at_bound.finish()
    assert sorted(report.staleness) == [0, 3]
    _, beyond = open_step(policy_version=6, max_staleness=3)
    result = beyond.add_groups([[build_sample(group_id="a", version=5), sample]])
    assert [item.reason for item in result] == [SkipReason.STALE]


def test_a_sample_as_long_as_the_model_reads_is_trained_and_a_longer_one_is_not():
    # The backend reads 32 tokens, and the prompt has 3.
    _, step = open_step()
    lengths = enumerate((28, 29, 30))
    result = step.add_groups([[build_sample(index=index, reward=index, num_tokens=num) for index, num in lengths]])
    assert result == (SkippedSample(group_id="g0", sample_index=2, reason=SkipReason.TOO_LONG),)
    assert step.finish().num_samples == 2


def test_a_call_reports_what_it_left_out_itself_and_the_step_all_of_it():
    _, step = open_step()
    results = [step.add_groups([build_group(name, [None, 0.0, 1.0])]) for name in "ab"]
    left_out = [SkippedSample(group_id=name, sample_index=0, reason=SkipReason.UNSCORED) for name in "ab"]
    assert results == [(left_out[0],), (left_out[1],)]
    assert step.finish().skipped == tuple(left_out)


def test_a_finished_step_takes_nothing_more():
    backend, step = open_step()
    step.add_groups([build_group("a", [0.0, 1.0])])
    step.finish()
    for more in (step.finish, lambda: step.add_groups([build_group("b", [0.0, 1.0])])):
        with pytest.raises(StepClosedError):
            more()
    step.abandon()
    assert (backend.steps, backend.num_discards) == ([9], 0)


def test_a_group_delivered_twice_is_trained_once():
    backend, step = open_step()
    step.add_groups([build_group("a", [0.0, 1.0])])
    again = step.add_groups([build_group("a", [0.0, 1.0])])
    assert [item.reason for item in again] == [SkipReason.DUPLICATE] * 2
    assert step.finish().num_samples == 2
    assert backend.steps == [9]


def test_loss_mask_and_given_advantages_are_used_as_they_are():
    backend, step = open_step()
    sample = build_sample(
        reward=1.0,
        loss_mask=np.array([True, False, True, False]),
        advantages=np.array([1, 2, 3, 4], dtype=np.float32),
    )
    step.add_groups([[sample]])
    report = step.finish()
    assert backend.packs[0].advantages.tolist() == [1.0, 3.0]
    assert report.num_loss_tokens == 2
    assert report.num_completion_tokens == 4


def test_what_does_not_fill_a_pack_waits_for_the_groups_that_come_next():
    backend, step = open_step(max_pack_tokens=32)
    # 15 tokens each: two fill a pack of 32, one does not.
    made = []
    for name in "abcde":
        step.add_groups([build_group(name, [0.0, 1.0])])
        made.append(len(backend.packs))
    assert made == [0, 1, 1, 2, 2]
    assert [pack.num_tokens for pack in backend.packs] == [30, 30]
    report = step.finish()
    assert [pack.num_tokens for pack in backend.packs] == [30, 30, 15]
    assert (report.num_packs, report.num_forward_tokens) == (3, 75)
    assert report.pack_fill == pytest.approx(75 / 96)


def test_a_loss_in_what_waited_that_is_not_finite_abandons_the_step():
    backend, step = open_step(RecordingBackend(poison_token=39))
    poisoned = build_sample(group_id="b", index=1, reward=0.0, completion_token_ids=np.full(4, 39, dtype=np.int32))
    step.add_groups([[build_sample(group_id="b"), poisoned]])
    with pytest.raises(NonFiniteLossError):
        step.finish()
    assert (backend.num_discards, backend.steps) == (1, [])


def test_a_loss_that_is_not_finite_abandons_the_step():
    backend, step = open_step(RecordingBackend(poison_token=39), max_pack_tokens=8)
    step.add_groups([build_group("a", [0.0, 1.0])])
    poisoned = build_sample(group_id="b", index=1, reward=0.0, completion_token_ids=np.full(4, 39, dtype=np.int32))
    with pytest.raises(NonFiniteLossError, match=r"of groups b$") as caught:
        step.add_groups([[build_sample(group_id="b"), poisoned]])
    assert caught.value.group_ids == ("b",)
    assert backend.num_discards == 1
    assert backend.steps == []
    with pytest.raises(StepClosedError):
        step.finish()


def test_a_gradient_that_is_not_finite_closes_the_step():
    backend, step = open_step(RecordingBackend(gradient=float("nan")))
    step.add_groups([build_group("a", [0.0, 1.0])])
    with pytest.raises(NonFiniteGradientError) as caught:
        step.finish()
    assert caught.value.group_ids == ("a",)
    assert backend.steps == []
    with pytest.raises(StepClosedError):
        step.add_groups([])


def test_a_step_without_a_trained_token_takes_no_optimiser_step():
    backend, step = open_step()
    step.add_groups([build_group("a", [None, None])])
    with pytest.raises(EmptyStepError, match="1 groups"):
        step.finish()
    assert backend.steps == []
    assert backend.num_discards == 1


def test_abandoning_discards_the_gradients_once():
    backend, step = open_step()
    step.add_groups([build_group("a", [0.0, 1.0])])
    step.abandon()
    step.abandon()
    assert backend.num_discards == 1
