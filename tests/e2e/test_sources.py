"""Whole runs of two sources, with unlike group sizes, limits and rewards, whose trainer is killed on the way."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from penstock.wire.source_tag import read_tag
from tests.e2e.runs import running, small_run
from tests.helpers.imports.reasoning_gym import skip_without_reasoning_gym

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
NUM_STEPS, GROUPS_PER_STEP = 6, 6
SIZES, LIMITS, REWARDS = {"sums": 4, "short": 2}, {"sums": 64, "short": 24}, {"sums": "exact_match", "short": "numeric"}


def test_two_sources_train_side_by_side_and_through_a_kill(task, tmp_path):
    rows = [
        {"name": "sums", "path": str(task.train_path), "weight": 2, "eval": str(task.eval_path)},
        {"name": "short", "path": str(task.train_path), "group_size": 2, "max_new_tokens": 24, "reward": "numeric"},
    ]
    settings = {"run__num_steps": NUM_STEPS, "run__checkpoint_every_steps": 2, "run__num_eval_prompts": 4}
    document = small_run(task, tmp_path, algorithm__prompts_per_step=GROUPS_PER_STEP, **settings)
    document["data"] = {"train": rows, "eval": [{"name": "short", "path": str(task.eval_path)}]}
    document["data"] |= {"max_prompt_tokens": 128, "difficulty": {"after": 1}, "curriculum": [{"weights": {"sums": 1}}]}
    with running(document | {"record": True}, tmp_path) as run:
        run.wait_for_step(3)
        run.kill("trainer")
        assert run.end() == 0, run.text
    steps, audit = run.metrics(), run.summary()["audit"]
    assert [step["policy_version"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert audit["balanced"] is True
    assert audit["in_flight"] == 0
    lines = [json.loads(line) for line in (run.folder.path / "trajectories.jsonl").read_text().splitlines()]
    # Steps that the killed trainer had taken since its checkpoint were taken and recorded again.
    newest: dict[int, int] = {}
    for line in lines:
        newest[line["policy_version"]] = max(line["history"], newest.get(line["policy_version"], 0))
    assert max(newest.values()) == 1
    samples = [line for line in lines if line["history"] == newest[line["policy_version"]]]
    assert len(samples) == audit["trained"] == sum(step["step/samples"] for step in steps)
    tags = {sample["group_id"]: tag for sample in samples if (tag := read_tag(sample["metadata_json"])) is not None}
    assert len(tags) == NUM_STEPS * GROUPS_PER_STEP
    names = Counter(tag.source for tag in tags.values())
    assert abs(names["sums"] - names["short"]) <= GROUPS_PER_STEP
    for sample in samples:
        name = tags[sample["group_id"]].source
        assert sample["group_size"] == SIZES[name]
        assert sample["sampling"]["max_new_tokens"] == LIMITS[name]
        assert len(sample["token_ids"]) <= LIMITS[name]
        assert sample["score"]["model"] == REWARDS[name]
    # No row twice, although the trainer began again from an earlier step.
    assert len({(tag.source, tag.epoch, tag.row) for tag in tags.values()}) == len(tags)
    evaluations = (run.folder.path / "evaluations.jsonl").read_text().splitlines()
    assert {f"source/{name}/greedy_accuracy" for name in SIZES} <= json.loads(evaluations[-1]).keys()
    report = run.folder.report.read_text()
    assert "<h2>Sources, in the last " in report
    assert all(f"source/{name}/pass_rate" in report for name in SIZES)


@pytest.mark.grid
def test_a_task_of_reasoning_gym_trains_beside_a_file_with_its_own_scorer_and_through_a_kill(task, tmp_path):
    skip_without_reasoning_gym()
    easy = {"reasoning_gym": "chain_sum", "config": {"max_terms": 2, "max_digits": 1, "min_digits": 1}}
    settings = {"run__num_steps": 4, "run__checkpoint_every_steps": 2, "run__num_eval_prompts": 3}
    document = small_run(task, tmp_path, sampling__max_new_tokens=16, **settings)
    document["data"]["train"] = [
        {"name": "file", "path": str(task.train_path)},
        {"name": "sums", "path": easy, "eval": {**easy, "size": 2}},
    ]
    with running(document | {"record": True}, tmp_path) as run:
        run.wait_for_step(3)
        run.kill("trainer")
        assert run.end() == 0, run.text
    samples = [json.loads(line) for line in (run.folder.path / "trajectories.jsonl").read_text().splitlines()]
    newest = max(sample["history"] for sample in samples if sample["policy_version"] == 4)
    tags = {}
    for sample in samples:
        tag = read_tag(sample["metadata_json"])
        assert sample["score"]["model"] == {"file": "exact_match", "sums": "reasoning_gym"}[tag.source]
        assert tags.setdefault((sample["history"], sample["group_id"]), tag) == tag
        if tag.source == "sums":
            assert json.loads(sample["metadata_json"])["reasoning_gym"]["index"] == tag.row
    assert newest == 1
    # Groups keep their rows when the trainer begins again, and no row of the task comes twice.
    by_group = {group: {tag for (_, each), tag in tags.items() if each == group} for _, group in tags}
    assert all(len(found) == 1 for found in by_group.values())
    rows = [tag.row for (tag,) in by_group.values() if tag.source == "sums"]
    assert len(rows) == len(set(rows)) >= 12
    assert run.summary()["audit"]["balanced"] is True
