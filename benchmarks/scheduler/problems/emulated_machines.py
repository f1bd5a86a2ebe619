"""Defines problems whose machines can be emulated on one computer, and variations of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Problem = dict[str, Any]

PROBLEM: Problem = {
    "id": "unlike",
    "gpu_types": {
        "A100-80": {"tflops_bf16": 312, "hbm_GB": 80, "hbm_GBps": 2039, "ar_bus_GBps": 155, "ar_latency_us": 10},
        "L40S": {"tflops_bf16": 362, "hbm_GB": 48, "hbm_GBps": 864, "ar_bus_GBps": 20, "ar_latency_us": 25},
        "L4": {"tflops_bf16": 121, "hbm_GB": 24, "hbm_GBps": 300, "ar_bus_GBps": 12, "ar_latency_us": 25},
    },
    "nodes": [
        {"name": "head", "gpu": "A100-80", "gpus": 2, "region": "here"},
        {"name": "l40s", "gpu": "L40S", "gpus": 2, "region": "there"},
        {"name": "l4", "gpu": "L4", "gpus": 1, "count": 2, "region": "there"},
    ],
    "links": [{"a": "here", "b": "there", "bw_Gbps": 400, "latency_ms": 1}],
    "model": {
        "params": 7.616e9,
        "layers": 28,
        "hidden": 3584,
        "q_heads": 28,
        "kv_heads": 4,
        "head_dim": 128,
        "vocab": 152064,
    },
    "workload": {
        "prompts_per_step": 8,
        "group_size": 8,
        "prompt_len": 20,
        "staleness": 12,
        "output_len": {"type": "lognormal", "median": 100, "sigma": 0.5, "max": 256},
        "train_tasks": [{"name": "actor", "kind": "train"}],
    },
    # The emulated machines load weights between two steps, and have an unused prefix cache.
    "cost_model": {"max_num_seqs": 32, "sync_pause_s": 0, "prefix_sharing": False},
}
"""Two GPUs that can fit the training, and slower ones of three machines at another site, which cannot."""

_SITE = {"region": "there"}
VARIATIONS: Mapping[str, Problem] = {
    "staleness 12": {},
    "staleness 6": {"workload": {"staleness": 6}},
    "staleness 3": {"workload": {"staleness": 3}},
    "staleness 1": {"workload": {"staleness": 1}},
    "alike": {
        "nodes": [PROBLEM["nodes"][0], {"name": "l40s", "gpu": "L40S", "gpus": 1, "count": 2, **_SITE}],
        "workload": {"staleness": 3},
    },
    "long tail": {
        "workload": {
            "staleness": 6,
            "group_size": 4,
            "prompts_per_step": 16,
            "output_len": {"type": "lognormal", "median": 60, "sigma": 0.9, "max": 384},
        }
    },
}
"""Differences from PROBLEM, by name."""


def variation(name: str) -> Problem:
    """A whole problem. Raises KeyError if the name is unknown."""
    changes = VARIATIONS[name]
    workload = {**PROBLEM["workload"], **changes.get("workload", {})}
    return {**PROBLEM, **changes, "workload": workload}
