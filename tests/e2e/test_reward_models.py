"""A reward model of the user's own, running as a process of its own, scores a whole run."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

from penstock.network.rpc import wait_until_serving
from tests.e2e.runs import assert_balanced, assert_within_bound, running, small_run
from tests.helpers.console import ROOT, environment
from tests.helpers.otlp import collecting
from tests.helpers.ports import free_address
from tests.helpers.traces import spans_in, written_spans

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@contextmanager
def serving(command, *, cwd, env):
    process = subprocess.Popen(command, cwd=cwd, env=env)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


async def assert_scores_a_run(task, folder, address, *, num_steps=3, bound=1, parts=(), **more):
    assert await wait_until_serving(address, timeout_s=60)
    settings = {"run__num_steps": num_steps, "algorithm__max_staleness": bound, "tracing__ratio": 0.5} | more
    document = small_run(task, folder, reward__model=f"grpc://{address}", **settings)
    if parts:
        document |= {"reward": [{"model": f"grpc://{address}", "name": "judge"}, *parts], "record": True}
    with running(document, folder) as run:
        assert run.end() == 0, run.text
        assert_balanced(run.summary(), num_samples=num_steps * 8 * 4)
        rewards = [step["reward/mean"] for step in run.metrics()]
    # The examples take up to 0.2 off for length, so no mean is a whole number of right answers.
    assert all((reward * 32) % 1 > 0 for reward in rewards)
    return run


def assert_traced(folder, *, num_steps):
    """A sampled group is one trace from its submission to its step, written by every service that had it."""
    spans = spans_in(folder)
    by_id = {each.span["spanId"]: each for each in spans}
    assert all(each.span["parentSpanId"] in by_id for each in spans if "parentSpanId" in each.span)
    steps = {each.attributes["rl.policy.version"]: each for each in spans if each.name == "rl.train.step"}
    assert sorted(map(int, steps)) == list(range(1, num_steps + 1))
    trained = [each for each in spans if each.name == "rl.group" and "rl.policy.version" in each.attributes]
    # Of 48 groups, each with a chance of a half.
    assert 10 <= len(trained) <= 38
    for group in trained:
        step = steps[group.attributes["rl.policy.version"]]
        assert group.links == [step.span["spanId"]]
        members = [each for each in spans if each.span["traceId"] == group.span["traceId"]]
        samples = [each for each in members if each.name == "rl.sample"]
        assert len(samples) == 4
        for sample in samples:
            parts = {each.name: each for each in members if each.span.get("parentSpanId") == sample.span["spanId"]}
            assert {name: each.service for name, each in parts.items()} == {
                "rl.sample.queue": "broker",
                "rl.sample.generate": "generator",
                "rl.sample.score": "broker",
                "rl.sample.wait_for_training": "broker",
            }
            assert parts["rl.sample.generate"].span["events"]
            assert sample.span["parentSpanId"] == group.span["spanId"]
            assert sample.span["spanId"] in step.links
            assert any(sample.span["spanId"] in each.links for each in spans if each.name == "rl.reward.score")
    assert {"rl.train.wait", "rl.train.compute", "rl.weights.publish", "rl.weights.update", "rl.generator.decode"} <= {
        each.name for each in spans
    }
    command = [sys.executable, "-m", "console", "logs", str(folder), "--sample", samples[0].attributes["rl.sample.key"]]
    said = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    told = [line.split()[2] for line in said.splitlines()]
    assert told[:2] == ["rl.group", "rl.sample"]
    assert {"rl.sample.generate:", "rl.reward.score", "rl.train.step"} <= set(told)


@pytest.mark.flaky(reruns=0)
async def test_a_python_reward_model_scores_a_run_on_policy(task, tmp_path):
    address = free_address()
    command = [sys.executable, "brevity.py", address]
    brevity = {"model": "length", "name": "half", "weight": -0.5, "length": {"target_tokens": 32}}
    with serving(command, cwd=ROOT / "examples" / "reward_python", env=environment()), collecting() as collector:
        endpoint = {"tracing__otlp_endpoint": f"http://{collector.target}"}
        run = await assert_scores_a_run(task, tmp_path, address, num_steps=6, bound=0, parts=[brevity], **endpoint)
    assert_within_bound(run, 0)
    for step in run.metrics():
        assert step["reward/mean"] == pytest.approx(step["component/judge"] - 0.5 * step["component/half"])
        assert {"component/judge/correct", "component/judge/penalty"} <= step.keys()
    assert "Components of the reward" in run.folder.report.read_text()
    rows = [json.loads(line) for line in (run.folder.path / "trajectories.jsonl").read_text().splitlines()]
    assert len(rows) == 6 * 8 * 4
    for row in rows:
        parts = row["score"]["components"]
        assert row["score"]["value"] == pytest.approx(parts["judge"] - 0.5 * parts["half"])
        assert row["score"]["model"] == "judge+half"
    assert_traced(run.folder.path, num_steps=6)
    assert collector.spans() == written_spans(run.folder.path)


@pytest.mark.node
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js and npm")
async def test_a_node_reward_model_scores_a_run(task, tmp_path):
    address = free_address()
    example = tmp_path / "reward_node"
    shutil.copytree(ROOT / "examples" / "reward_node", example, ignore=shutil.ignore_patterns("node_modules"))
    await asyncio.to_thread(subprocess.run, ["npm", "ci", "--silent"], cwd=example, check=True, timeout=180)
    env = {**os.environ, "PENSTOCK_PROTOS": str(ROOT / "protos")}
    with serving(["node", "server.js", address], cwd=example, env=env):
        await assert_scores_a_run(task, tmp_path, address)
