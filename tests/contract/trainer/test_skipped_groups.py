"""A loss or gradient that is not finite: costs the groups at fault where the configuration allows it, else the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.v1 import trainer_pb2, types_pb2
from penstock.wire.codec import float32_bytes
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker, scored_group
from tests.helpers.serving import serving
from tests.helpers.trainers.training import run_document, running_trainer

POISON_OF_THE_LOSS, POISON_OF_THE_GRADIENT = 3e38, 5e37
"""Advantages that overflow float32 in the sum over a completion; and in the gradient only."""


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def poisoning(advantage: float, *group_ids: str):
    """Makes the samples of some groups, or with no names of all, carry an advantage."""

    def make_group(prompt: types_pb2.Prompt, *, policy_version: int) -> types_pb2.TrajectoryGroup:
        group = scored_group(prompt, policy_version=policy_version)
        if prompt.group_id in group_ids or not group_ids:
            for trajectory in group.trajectories:
                trajectory.advantages = float32_bytes(np.full(5, advantage))
        return group

    return make_group


async def run_with(folder, model, make_group, algorithm=(), **trainer):
    """Three steps of two groups, every sample in a pack of its own: the broker, the run's end and its lines."""
    broker = ScriptedTrainingBroker()
    broker.make_group = make_group
    folder.mkdir()
    async with serving(broker.service()) as (_, target), running_trainer() as running:
        document = run_document(folder, model, target, num_eval_prompts=0)
        document["algorithm"] |= dict(algorithm)
        run_dir = Path(await running.start(document | {"trainer": {"tokens_per_pack": 16, **trainer}}))
        finished = (await running.events())[-1].finished
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return broker, finished, lines


async def test_a_poisoned_group_is_dropped_by_name_and_its_step_is_one_without_it(tmp_path, model) -> None:
    poisoned, finished, lines = await run_with(
        tmp_path / "poisoned", model, poisoning(POISON_OF_THE_LOSS, "t3"), max_skips_in_a_row=1
    )
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    assert poisoned.dropped == {"t3": "non_finite_loss"}
    books = poisoned.books()
    assert (books.submitted, books.trained, books.in_flight, books.balanced) == (28, 24, 0, True)
    assert [line["step/skipped_attempts"] for line in lines] == [0, 1, 0]
    # The same run where that group cannot even be read.
    other, finished, expected = await run_with(tmp_path / "other", model, poisoning(np.nan, "t3"))
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    assert other.dropped == {"t3": "malformed"}
    assert poisoned.trained == other.trained
    for name in ("optimizer/grad_norm", "loss/entropy"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in expected], rel=1e-3)


async def test_a_bad_gradient_of_unknown_origin_costs_the_step_s_groups(tmp_path, model) -> None:
    broker, finished, lines = await run_with(
        tmp_path / "run", model, poisoning(POISON_OF_THE_GRADIENT, "t0"), max_skips_in_a_row=1
    )
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    assert broker.dropped == {"t0": "non_finite_gradient", "t1": "non_finite_gradient"}
    assert broker.books().balanced
    assert [line["step/samples"] for line in lines] == [8, 8, 8]


async def test_too_many_skips_in_a_row_end_the_run_and_name_the_groups(tmp_path, model) -> None:
    broker, finished, lines = await run_with(
        tmp_path / "run", model, poisoning(POISON_OF_THE_LOSS), max_skips_in_a_row=2
    )
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert "the loss" in finished.message
    assert "of groups t" in finished.message
    assert len(broker.dropped) == 2
    assert not lines


async def test_without_leave_to_skip_the_first_one_ends_the_run(tmp_path, model) -> None:
    broker, finished, _ = await run_with(tmp_path / "run", model, poisoning(POISON_OF_THE_LOSS, "t1"))
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED
    assert finished.message.endswith("of groups t1")
    assert not broker.dropped


async def test_a_poisoned_group_that_is_replayed_costs_no_fresh_one(tmp_path, model) -> None:
    handed_out = set()

    def make_group(prompt: types_pb2.Prompt, *, policy_version: int) -> types_pb2.TrajectoryGroup:
        is_retained = prompt.group_id in handed_out
        handed_out.add(prompt.group_id)
        advantage = POISON_OF_THE_LOSS if is_retained and prompt.group_id == "t0" else 0.5
        return poisoning(advantage)(prompt, policy_version=policy_version)

    replaying = {"name": "tba", "kl_coefficient": 0.01, "num_replayed_groups": 2}
    broker, finished, lines = await run_with(tmp_path / "run", model, make_group, replaying, max_skips_in_a_row=1)
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    assert [line["step/skipped_attempts"] for line in lines] == [0, 0, 1]
    assert (broker.dropped, broker.books().trained) == ({}, 24)
