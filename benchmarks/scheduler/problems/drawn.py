"""Clusters of unlike machines drawn at random, to compare solvers on."""

from __future__ import annotations

from random import Random

from benchmarks.scheduler.problems.settings import (
    GRPO_TASKS,
    PPO_TASKS,
    PRICES,
    Document,
    lognormal,
    machines,
    make_problem,
)
from services.scheduler.problem.problem import Problem

_MODELS = ("qwen2.5-1.5b", "qwen3-4b", "qwen2.5-7b", "qwen3-8b")


def drawn_problem(seed: int) -> Problem:
    """Two to five entries of one to three machines of 4 or 8 GPUs in up to three regions, 8 to 120 GPUs in all."""
    random = Random(seed)
    regions = [f"r{index}" for index in range(random.randint(1, 3))]
    nodes = [
        {
            **machines(
                random.choice(sorted(PRICES)),
                random.randint(1, 3),
                region=regions[index % len(regions)],
                nic_gbps=random.choice([25.0, 100.0, 400.0]),
                gpus=random.choice([4, 8]),
            ),
            "name": f"entry{index}",
        }
        for index in range(random.randint(max(2, len(regions)), 5))
    ]
    workload: Document = {
        "prompts_per_step": random.choice([32, 128]),
        "group_size": random.choice([4, 8]),
        "prompt_len": 200,
        "output_len": lognormal(random.choice([300.0, 2000.0]), 0.7, 8192),
        "staleness": random.randint(0, 4),
        "train_tasks": random.choice([GRPO_TASKS, PPO_TASKS]),
    }
    links = [
        {"a": one, "b": other, "bw_Gbps": random.choice([1.0, 5.0, 20.0]), "latency_ms": random.choice([1, 20])}
        for index, one in enumerate(regions)
        for other in regions[:index]
    ]
    constraints = {
        "train_single_region": random.random() < 0.5,
        "tail_blocking": random.random() < 0.3,
    }
    model = random.choice(_MODELS)
    return make_problem(f"drawn-{seed}", nodes, model, workload=workload, links=links, constraints=constraints)
