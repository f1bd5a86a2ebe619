"""Both sides as processes: what they write becomes a curve, and a side that fails says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.children import child, run_child
from benchmarks.e2e import penstock_side, trl_side
from benchmarks.e2e.alone import MAX_STEPS, spread_steps
from benchmarks.e2e.task import Task
from benchmarks.trainer.batches import packed_batch
from benchmarks.trainer.recorded import read_steps

PLAYED = """
import json, sys
task, out = json.loads(sys.argv[2]), sys.argv[3]
with open(out, "w") as file:
    print(json.dumps({"time": 10.0}), file=file)
    for step in range(task["num_steps"]):
        numbers = {"reward": 0.5, "num_samples": task["group_size"], "num_tokens": task["num_threads"]}
        print(json.dumps({"time": 20.0 + step, **numbers}), file=file)
"""


def task(**changes: object) -> Task:
    values = {"model_dir": Path("m"), "train_path": Path("t"), "num_steps": 3, "until_reward": None, "seed": 0}
    return Task(**(values | changes))


async def test_the_trl_side_reads_what_its_worker_wrote(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{PLAYED}", encoding="utf-8")
    script.chmod(0o755)
    found = await trl_side.train(task(), tmp_path, python=script, num_threads=2)
    assert found.begin_s == 10.0
    assert [step.time_s for step in found.steps] == [20.0, 21.0, 22.0]
    assert [step.num_tokens for step in found.steps] == [2, 2, 2]


async def test_a_failed_side_reports_the_end_of_its_output(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; print('no such thing'); sys.exit(3)")
    with pytest.raises(RuntimeError, match=r"(?s)TRL: ended with status 3.*no such thing"):
        await run_child(*command, timeout_s=30.0, what="TRL", log=tmp_path / "log")


def line(version: int, reward: float) -> str:
    numbers = {"reward/mean": reward, "step/samples": 256.0, "step/response_tokens": 9_000.0, "time/step_s": 4.0}
    return json.dumps({"policy_version": version, "time": 100.0 + version, **numbers}) + "\n"


async def test_the_penstock_side_follows_a_run_until_the_reward_is_reached(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(version, 0.1 * version) for version in range(1, 20)), encoding="utf-8")
    async with child(sys.executable, "-c", "", log=tmp_path / "log") as process:
        found = await penstock_side.follow(process, path, task(num_steps=30, until_reward=0.6), tmp_path / "log")
    # The mean of steps 4 to 8 is the first to reach it.
    assert len(found.steps) == 8
    assert found.begin_s == 97.0


async def test_a_run_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(1, 0.1), encoding="utf-8")
    async with child(sys.executable, "-c", "print('out of luck')", log=tmp_path / "log") as process:
        with pytest.raises(RuntimeError, match="out of luck"):
            await penstock_side.follow(process, tmp_path / "metrics.jsonl", task(num_steps=2), tmp_path / "log")


def row(version: int, group: str, index: int, reward: float) -> dict[str, object]:
    return {
        "policy_version": version,
        "group_id": group,
        "sample_index": index,
        "prompt_token_ids": [1, 2, 3],
        "sampling": {"temperature": 0.7},
        "token_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "versions": [version - 1],
        "version_lengths": [2],
        "score": {"status": "ok", "value": reward},
    }


def test_recorded_samples_become_the_batches_of_their_steps(tmp_path: Path) -> None:
    rows = [row(2, "b", 0, 1.0), row(1, "a", 0, 1.0), row(1, "a", 1, 0.0), row(1, "c", 0, 1.0), row(1, "c", 1, 1.0)]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    first, second = read_steps(path)
    assert [[sample.group_id for sample in group] for group in first] == [["a", "a"], ["c", "c"]]
    assert [len(group) for group in second] == [1]
    batch = packed_batch(first, max_pack_tokens=64)
    # Group c teaches nothing: it counts, and goes through no model.
    assert (batch.num_samples, batch.num_loss_tokens) == (4, 8)
    (pack,) = batch.packs
    assert pack.segment_lengths == (5, 5)
    assert pack.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_steps_are_spread_over_the_run_without_the_first() -> None:
    steps = [[[]] for _ in range(40)]
    chosen = spread_steps(steps)
    assert len(chosen) == MAX_STEPS
    assert [next(i for i, each in enumerate(steps) if each is step) for step in chosen] == list(range(1, 40, 5))
    assert spread_steps(steps[:1]) == steps[:1]
