"""Runs whose services move between machines: their configuration, and how far they are."""

import json
import re

from tests.e2e.runs import small_run


def on_policy(task, folder):
    """What is trained on depends on the seed alone."""
    settings = {"run__num_steps": 10_000, "run__num_eval_prompts": 0, "data__eval": None, "algorithm__max_staleness": 0}
    return small_run(task, folder, reward__model="brevity:brevity", **settings)


def storage_of(folder):
    return f"file://{folder}/storage"


def plans(run):
    path = run.folder.plans
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_step(run):
    """What the console printed: no folder on its machine has the trainer's records before the end."""
    return max(map(int, re.findall(r"\bstep (\d+)/10000", run.text)), default=0)


def train(run, more):
    goal = last_step(run) + more
    run.wait_for(f"step {goal}", lambda: last_step(run) >= goal)
