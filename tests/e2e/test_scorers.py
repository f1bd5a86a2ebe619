"""PPO with reference and critic in services of their own: real processes, some killed, and the losses of all in one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from console.config.run_folder import RunFolder
from console.launch.metrics_targets import run_targets
from console.page.run_data import RunData
from console.recording.reader import read_groups
from quickstart.prepare import Prepared
from tests.e2e.runs import RUN_ID, assert_balanced, assert_logs_are_json, running, small_run
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.models.tiny_model import make_tiny_model
from tests.helpers.observability.prometheus import PROMETHEUS, prometheus
from tests.helpers.serving import serving
from tests.helpers.traces import spans_in
from tests.helpers.trainers.training import run_alone

pytestmark = [pytest.mark.e2e, pytest.mark.flaky(reruns=0), pytest.mark.timeout(600)]
NUM_STEPS = 3
SERVICES = ("broker", "scheduler", "generator-0", "reward", "scorer-0", "scorer-1", "critic", "trainer")


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(64)))
    (tmp_path / "brevity.py").write_text("def brevity(completion: str) -> float:\n    return -len(completion) / 100\n")
    return Prepared(model_dir=make_tiny_model(tmp_path / "model"), train_path=path, eval_path=path)


def tensors(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    """Those that a checkpoint resumes from whose names begin so, without that prefix."""
    files = (load_file(path) for path in (checkpoint / "resume").glob("*.safetensors"))
    found = {name: tensor for each in files for name, tensor in each.items()}
    return {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}


def assert_equal_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-5, msg=name)


def assert_the_page_shows_the_gap_that_the_trainer_reports(folder: RunFolder, metrics: list[dict[str, Any]]) -> None:
    data = RunData(folder)
    for line in metrics:
        step = str(line["policy_version"])
        listed = data.answer("samples", {"step": step, "limit": "500"})["samples"]
        samples = [data.answer("sample", {"step": step, "key": each["key"]}) for each in listed]
        tokens = [each for sample in samples for each in sample["tokens"] if each["mask"]]
        gaps = np.array([each["trainer_logprob"] - each["logprob"] for each in tokens])
        # Gaps are kept in 16 bits.
        assert np.mean(np.exp(gaps) - gaps - 1) == pytest.approx(line["loss/mismatch_kl"], rel=5e-3, abs=1e-7)


def assert_one_trace_holds_each_group(folder: Path) -> None:
    """From submission to the step that trained it, over the scorer; the critic's work is a part of the step.

    Scorer and critic take what they recorded in their last second with them when they are killed.
    """
    spans = spans_in(folder)
    steps = {each.span["spanId"]: each for each in spans if each.name == "rl.train.step"}
    groups = [each for each in spans if each.name == "rl.group" and "rl.policy.version" in each.attributes]
    assert len(groups) == NUM_STEPS * 8
    computed = {link for each in spans if each.name == "rl.reference.score" for link in each.links}
    num_computed = 0
    for group in groups:
        members = [each for each in spans if each.span["traceId"] == group.span["traceId"]]
        samples = [each for each in members if each.name == "rl.sample"]
        assert len(samples) == 4
        for sample in samples:
            own = sample.span["spanId"]
            parts = {each.name for each in members if each.span.get("parentSpanId") == own}
            assert {"rl.sample.generate", "rl.sample.score", "rl.sample.reference"} <= parts
            num_computed += own in computed
            assert own in steps[group.links[0]].links
    assert num_computed >= NUM_STEPS * 8 * 4 // 2
    for what in ("evaluate", "accumulate", "step"):
        of_critic = [each for each in spans if each.name == f"rl.critic.{what}"]
        assert {each.service for each in of_critic} == {"critic"}
        parents = {each.span["parentSpanId"] for each in of_critic}
        assert parents <= steps.keys()
        assert len(parents) >= NUM_STEPS - 1


async def test_a_killed_scorer_and_critic_cost_no_sample_and_losses_and_weights_are_those_of_all_in_one(task, tmp_path):
    document = small_run(
        task, tmp_path, run__num_steps=NUM_STEPS, run__num_eval_prompts=0, reward__model="brevity:brevity",
        algorithm__name="ppo", algorithm__kl_coefficient=0.05, algorithm__reference="service",
        algorithm__critic="service", algorithm__num_minibatches=2, run__checkpoint_every_steps=NUM_STEPS,
        algorithm__max_staleness=0, optimizer__learning_rate=1e-3, policy__token_shards=3, tracing__ratio=1.0,
        log__format="json",
    )  # fmt: skip
    document |= {"scorers": 2, "record": True}
    with running(document, tmp_path) as run:
        if PROMETHEUS is not None:
            async with prometheus(tmp_path / "prometheus", runs_dir=tmp_path / "runs") as seen:
                await seen.until_up({f"{RUN_ID}/{name}": f"penstock-{name.partition('-')[0]}" for name in SERVICES})
        run.wait_for_step(1)
        run.kill("scorer-0")
        run.kill("critic")
        assert run.end() == 0, run.text
        apart = run.metrics()
    assert not run_targets(run.folder).exists()
    assert_balanced(run.summary(), num_samples=NUM_STEPS * 8 * 4)
    restarts = run.summary()["restarts"]
    assert (restarts["scorer-0"], restarts["critic"]) == (1, 1)
    assert not {"reference_failed", "too_many_leases"} & run.summary()["audit"]["dropped"].keys()

    assert_the_page_shows_the_gap_that_the_trainer_reports(run.folder, apart)
    assert_one_trace_holds_each_group(run.folder.path)
    for name in SERVICES:
        assert_logs_are_json(run.folder.logs, name)

    recorded = {each.group.prompt.group_id: each.group for each in read_groups(run.folder.path / "trajectories.jsonl")}
    broker = ScriptedTrainingBroker()
    broker.make_group = lambda prompt, *, policy_version: recorded[prompt.group_id]
    sections = ("run", "model", "data", "sampling", "algorithm", "optimizer")
    alone_document = {name: dict(document[name]) for name in sections}
    alone_document["run"]["dir"] = str(tmp_path / "alone")
    alone_document["algorithm"] |= {"reference": "trainer", "critic": "trainer"}
    async with serving(broker.service()) as (_, target):
        folder = await run_alone(alone_document | {"broker": target})
    alone = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(alone) == len(apart) == NUM_STEPS
    for one, other in zip(alone, apart, strict=True):
        names = {name for name in one if name.startswith("loss/")} | {"optimizer/grad_norm"}
        assert {"loss/loss", "loss/value_loss"} <= names
        expected = {name: other[name] for name in names}
        assert {name: one[name] for name in names} == pytest.approx(expected, rel=1e-5, abs=1e-5)
    last = f"checkpoints/step_{NUM_STEPS}"
    assert_equal_weights(tensors(folder / last, "weights/"), tensors(run.folder.path / last, "weights/"))
    assert_equal_weights(tensors(folder / last, "critic/weights/"), tensors(run.folder.critic / last, "weights/"))
