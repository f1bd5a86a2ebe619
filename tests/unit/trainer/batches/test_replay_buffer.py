"""Which trained groups are kept and drawn again, and what a step does with them."""

from collections import Counter

import pytest

from services.trainer.algorithms.dr_grpo import DR_GRPO
from services.trainer.algorithms.tba import TBA
from services.trainer.batches.replay_buffer import ReplayBuffer
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import StepSettings
from tests.unit.trainer.builders import RecordingBackend, build_group, build_sample


def buffer_of(steps, *, max_steps=10, seed=3):
    """A buffer of steps of (name, rewards) pairs."""
    buffer = ReplayBuffer(max_steps=max_steps, seed=seed)
    for version, groups in enumerate(steps, start=1):
        for name, rewards in groups:
            buffer.add(name, build_group(name, rewards), policy_version=version)
    return buffer


def names(groups):
    return [group[0].group_id for group in groups]


def test_a_step_draws_from_the_steps_before_the_newest_and_no_older_ones_are_held():
    buffer = buffer_of([[("a", [1.0]), ("b", [0.0])], [("c", [0.5])], [("d", [0.5])], [("e", [0.5])]], max_steps=2)
    assert sorted(names(buffer.draw(10, policy_version=4))) == ["c", "d"]
    assert len(buffer) == 3


def test_whether_the_newest_step_has_come_does_not_change_a_draw():
    steps = [[(f"g{step}{i}", [0.0, i / 4]) for i in range(4)] for step in range(6)]
    early, late = (names(buffer_of(known, max_steps=3).draw(5, policy_version=6)) for known in (steps[:5], steps))
    assert early == late


def test_what_is_forgotten_is_not_drawn():
    buffer = buffer_of([[("a", [1.0]), ("b", [0.0])]])
    buffer.forget(["a"])
    assert names(buffer.draw(2, policy_version=2)) == ["b"]


def test_a_draw_names_no_group_twice_and_is_repeatable():
    buffer = buffer_of([[(f"g{step}{i}", [0.0, i / 4]) for i in range(4)] for step in range(6)])
    drawn = [names(buffer.draw(9, policy_version=version)) for version in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 9


def test_recent_groups_and_well_rewarded_old_ones_are_drawn_most_often():
    steps = [[(f"old-bad{i}", [0.0, 0.0]) for i in range(9)] + [("old-good", [1.0, 1.0])]] + [[]] * 8
    steps.append([("new-bad", [0.0, 0.0])])
    counts = Counter(
        name for seed in range(200) for name in names(buffer_of(steps, seed=seed).draw(2, policy_version=11))
    )
    assert counts["new-bad"] == 200
    # exp(1 / std) over nine times 1: a good third or more, where an even draw gives a tenth.
    assert counts["old-good"] > 100


def test_nothing_is_drawn_from_an_empty_buffer_and_no_unscored_sample():
    assert buffer_of([]).draw(4, policy_version=0) == []
    buffer = buffer_of([[("a", [None, 1.0]), ("b", [None])]])
    [group] = buffer.draw(4, policy_version=2)
    assert [sample.sample_index for sample in group] == [1]


def test_steps_that_a_rewind_made_void_are_forgotten():
    buffer = buffer_of([[("a", [1.0])], [("b", [1.0])], [("c", [1.0])]])
    buffer.forget_from(2)
    assert names(buffer.draw(5, policy_version=4)) == ["a"]


def open_step(algorithm, *, policy_version=20):
    backend = RecordingBackend()
    return backend, TrainingStep(
        backend,
        StepSettings(
            policy_version=policy_version,
            max_staleness=1,
            max_pack_tokens=1000,
            algorithm=algorithm,
            normalization=algorithm.normalization,
        ),
    )


def group_of(name, *, version, rewards=(1.0, 0.0)):
    return [build_sample(group_id=name, index=i, reward=reward, version=version) for i, reward in enumerate(rewards)]


def test_replayed_samples_count_in_the_gradient_and_in_no_book():
    backend, step = open_step(TBA)
    step.add_replayed([group_of("old", version=3)])
    assert len(step.add_groups([group_of("fresh", version=19), group_of("late", version=3)])) == 2
    report = step.finish()
    assert sum(len(pack.segment_lengths) for pack in backend.packs) == 4
    assert backend.steps == [4]
    assert (report.num_samples, report.num_groups, max(report.staleness)) == (2, 1, 1)
    assert (report.num_replayed_samples, report.replayed_staleness_max) == (2, 17)
    assert {skipped.group_id for skipped in report.skipped} == {"late"}


def test_an_algorithm_that_is_not_off_policy_replays_nothing():
    _, step = open_step(DR_GRPO)
    with pytest.raises(ValueError, match="dr_grpo"):
        step.add_replayed([group_of("old", version=3)])
