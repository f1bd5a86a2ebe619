"""Every algorithm trains a real tiny model for a step, with the settings that a run may give."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest

from penstock.v1 import trainer_pb2, types_pb2
from penstock.wire.codec import float32_bytes
from services.trainer.algorithms.registry import ALGORITHMS
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker, scored_group
from tests.helpers.serving import serving
from tests.helpers.trainers.training import run_document, running_trainer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def taught_group(prompt: types_pb2.Prompt, *, policy_version: int) -> types_pb2.TrajectoryGroup:
    """A group with log-probs of a teacher."""
    group = scored_group(prompt, policy_version=policy_version)
    for trajectory in group.trajectories:
        trajectory.reference_logprobs = float32_bytes([-2.0] * 5)
    return group


@pytest.mark.parametrize(
    ("name", "num_minibatches"),
    [
        *((name, 1) for name in ALGORITHMS),
        ("ppo", 2),
        *(pytest.param(name, 2, marks=pytest.mark.grid) for name in ("dr_grpo", "reinforce_plus_plus", "tba")),
    ],
)
async def test_a_step_of_every_algorithm_changes_the_weights(
    tmp_path: Path, model: Path, name: str, num_minibatches: int
) -> None:
    document = run_document(tmp_path, model, "", num_steps=1, num_eval_prompts=0)
    document["algorithm"] |= {
        "name": name,
        "num_minibatches": num_minibatches,
        "correction": "masked",
        "correction_level": "sequence",
        "max_importance_weight": 1e6,
        "kl_coefficient": 0.01,
        "kl_estimator": "k2",
        "overlong_buffer_tokens": 4,
    }
    broker = ScriptedTrainingBroker()
    if ALGORITHMS[name].needs_teacher:
        document["algorithm"] |= {"reference": "service", "reference_path": str(model)}
        broker.make_group = taught_group
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        run_dir = Path(await trainer.start(document | {"broker": target}))
        finished = (await trainer.events())[-1].finished
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    [line] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert line["optimizer/grad_norm"] > 0
    assert line["loss/importance_weight"] > 0
    assert line["step/samples"] == 8


async def test_ppo_trains_on_groups_of_one(tmp_path: Path, model: Path) -> None:
    document = run_document(tmp_path, model, "", num_steps=1, num_eval_prompts=0)
    document["algorithm"] |= {"name": "ppo", "group_size": 1, "prompts_per_step": 4}
    broker, rewards = ScriptedTrainingBroker(), cycle((0.0, 1.0))

    def scored_alone(prompt: types_pb2.Prompt, *, policy_version: int) -> types_pb2.TrajectoryGroup:
        group = scored_group(prompt, policy_version=policy_version)
        group.trajectories[0].score.value = next(rewards)
        return group

    broker.make_group = scored_alone
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        run_dir = Path(await trainer.start(document | {"broker": target}))
        finished = (await trainer.events())[-1].finished
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    [line] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert line["step/samples"] == 4
    assert line["optimizer/grad_norm"] > 0


@pytest.mark.parametrize(("refresh_steps", "is_near"), [(1, True), (0, False)])
async def test_the_kl_is_taken_against_the_version_that_was_refreshed_last(
    tmp_path: Path, model: Path, refresh_steps: int, is_near: bool
) -> None:
    document = run_document(tmp_path, model, "", num_steps=3, num_eval_prompts=0)
    document["algorithm"] |= {"kl_coefficient": 0.01, "reference_refresh_steps": refresh_steps}
    async with serving(ScriptedTrainingBroker().service()) as (_, target), running_trainer() as trainer:
        run_dir = Path(await trainer.start(document | {"broker": target}))
        finished = (await trainer.events())[-1].finished
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss/reference_kl"] == pytest.approx(0, abs=1e-6)
    assert (lines[2]["loss/reference_kl"] < 1e-6) is is_near
