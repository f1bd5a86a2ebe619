"""Clusters with GPUs so small that a tiny model needs several of them to train: plans of every mesh, at toy size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from penstock.model.model_shape import read_numbers
from services.scheduler.problem.problem import Problem

PACK_TOKENS = 64
LONGEST = 32
"""Tokens of a completion."""
STEPS = 2
_SPEEDS = {"H800": 990, "L40S": 362, "L4": 121}
"""Types that an engine can emulate, with their arithmetic; memory is drawn."""


@st.composite
def clusters(
    draw: st.DrawFn,
    model_dir: Path,
    *,
    has_wide_weights: bool = False,
    has_critic: bool = False,
    has_slow_rewards: bool = False,
) -> Problem:
    """One to three unlike machines whose memory is some of the model's training state, and perhaps one without GPUs.

    They are in one region, or the last of several in another one.

    Wide weights take as much of a generator's memory as the state does of a trainer's: GPUs with less generate in twos.
    Slow rewards are planned to take a worker on every machine.
    """
    critic: list[dict[str, Any]] = [
        {"name": "critic", "kind": "infer", "shares_weights": True, "is_service": True},
        {"name": "critic_train", "kind": "train", "is_service": True},
    ]
    model = read_numbers(model_dir)
    state_GB = 16 * model["params"] / 1e9
    kinds = draw(st.lists(st.sampled_from(sorted(_SPEEDS)), min_size=1, max_size=3, unique=True))
    sizes = st.sampled_from((2,) if has_wide_weights else (1, 2) if len(kinds) > 1 else (4,))
    nic_Gbps = draw(st.sampled_from((0.005, 0.05, 1)))
    nodes = [{"name": kind.lower(), "gpu": kind, "gpus": draw(sizes), "nic_Gbps": nic_Gbps} for kind in kinds]
    is_spread = len(kinds) > 1 and draw(st.booleans())
    for index, node in enumerate(nodes):
        node["region"] = "far" if is_spread and index else "home"
    return Problem.model_validate(
        {
            "id": "drawn",
            "gpu_types": {
                kind: {
                    "tflops_bf16": _SPEEDS[kind],
                    "hbm_GB": state_GB * draw(st.sampled_from((0.8,) if has_wide_weights else (0.8, 1.5, 3))),
                    "hbm_GBps": 3000,
                    "ar_bus_GBps": draw(st.sampled_from((0.003, 1))),
                }
                for kind in kinds
            },
            "nodes": nodes,
            "hosts": [{"name": f"desk-{region}", "region": region} for region in ("home", "far")[: 1 + is_spread]]
            if draw(st.booleans())
            else [],
            "links": [{"a": "home", "b": "far", "bw_Gbps": 10}] if is_spread else [],
            "model": {**model, "weight_bytes": 16 if has_wide_weights else 2},
            "constraints": {"gen_pp": 2},
            "workload": {
                "prompts_per_step": 12,
                "group_size": 2,
                "prompt_len": 4,
                "staleness": 1,
                "reward": {"seconds_per_sample": 1e6} if has_slow_rewards else None,
                "output_len": {"type": "lognormal", "median": 12, "sigma": 0.4, "max": LONGEST},
                "train_tasks": [
                    {"name": "actor", "kind": "train"},
                    {"name": "reference", "kind": "infer", "is_service": draw(st.booleans())},
                    *(critic if has_critic else ()),
                ],
            },
            # Slow arithmetic makes it worth while to train on several GPUs.
            "cost_model": {
                "train_pack_tokens": PACK_TOKENS,
                "mem_util": 1,
                "reserve_GB": 0,
                "mfu_train": 1e-6,
                "mfu_infer": 1e-5,
                "sync_pause_s": 0,
            },
        }
    )


def run_of(model_dir: Path, data: Path, folder: Path) -> dict[str, Any]:
    """A run whose generators are emulated and whose trainer's processes are on CPUs."""
    return {
        "run": {"id": "drawn", "dir": str(folder / "runs"), "num_steps": STEPS, "checkpoint_every_steps": 100},
        "model": {"path": str(model_dir), "dtype": "float32"},
        "data": {"train": str(data), "max_prompt_tokens": 16},
        "reward": {"model": "exact_match"},
        "algorithm": {"kl_coefficient": 0.01},
        "generator": {"engine": "emulated", "emulated": {"model": "qwen2.5-1.5b", "time_scale": 50}},
        "trainer": {"device": "cpu", "tokens_per_pack": PACK_TOKENS},
    }
