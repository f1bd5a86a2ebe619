"""The quick start, shortened: five real services, vLLM on the CPU, and a model that gets better."""

import json
import os
import re
from pathlib import Path

import pytest

from services.generator.engines.vllm.config import VllmEngineConfig
from tests.e2e.conftest import TASK_DIR
from tests.e2e.runs import assert_balanced, penstock
from tests.helpers.processes import children_of

NUM_STEPS = 16

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_model_learns_and_its_checkpoint_loads(warm_task, tmp_path):
    settings = [f"run.num_steps={NUM_STEPS}", "run.num_eval_prompts=192", "run.id=short", f"run.dir={tmp_path}"]
    settings += [
        f"model.path={warm_task.model_dir}",
        f"data.train={warm_task.train_path}",
        f"data.eval={warm_task.eval_path}",
    ]
    with penstock(
        "quickstart", "--dir", str(TASK_DIR.parent), *settings, cwd=tmp_path, run_dir=tmp_path / "short"
    ) as run:
        run.wait_for_step(2)
        assert_the_engine_has_a_core_of_its_own(run)
        assert run.end(timeout_s=800) == 0, run.text
        summary = run.summary()

    assert_balanced(summary, num_samples=NUM_STEPS * 32 * 8)
    assert summary["reward_last"] >= summary["reward_first"] + 0.08
    assert summary["eval_accuracy_end"] >= summary["eval_accuracy_start"] + 0.08
    assert 0 < summary["max_staleness_seen"] <= summary["max_staleness"] == 1
    assert summary["overlap_ratio"] > 0.3
    assert_lengths_were_foreseen(summary["lengths"])
    assert [step["policy_version"] for step in run.metrics()] == list(range(1, NUM_STEPS + 1))
    assert_readable_offline(run.folder.report.read_text())
    prompt = json.loads(warm_task.eval_path.read_text().splitlines()[0])["prompt"]
    assert_loads_with_transformers(run.folder.checkpoints / f"step_{NUM_STEPS}", prompt)


def assert_the_engine_has_a_core_of_its_own(run):
    usable = os.sched_getaffinity(0)
    if len(usable) < 2 or not VllmEngineConfig.decodes_on_cpus():
        return
    pids = {record.name: record.pid for record in run.folder.records()}
    engines = [pid for pid in children_of(pids["generator-0"]) if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()]
    assert [os.sched_getaffinity(engine) for engine in engines] == [{max(usable)}]
    for name in ("generator-0", "trainer", "broker", "scheduler", "reward", "redis"):
        assert os.sched_getaffinity(pids[name]) == usable - {max(usable)}


def assert_lengths_were_foreseen(lengths):
    assert lengths["model"] == "ridge"
    assert lengths["num_observations"] >= NUM_STEPS * 32 * 8
    tests = {(each["forecaster"], each["test"]): each for each in lengths["qualities"]}
    names = {(name, test) for name in ("ridge", "prompt_length") for test in ("held_out", "prequential")}
    assert set(tests) == names
    assert tests["ridge", "prequential"]["recall_longest_20_percent"] > 0.5


def assert_readable_offline(report):
    assert '"/api/sample?run=0&step=' in report
    assert len(report.encode()) <= 5_000_000
    assert not re.search(r"""(src|href)=["']https?:""", report)
    assert "from_pretrained" in report


def assert_loads_with_transformers(checkpoint, prompt):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    inputs = tokenizer(prompt, return_tensors="pt")
    completion = model.generate(**inputs, max_new_tokens=200, do_sample=False)
    assert "####" in tokenizer.decode(completion[0])
