"""Defines GPUs, models and workloads of published measurements, and problems made of them.

Peaks are dense bf16 (fp16 on V100 and T4) of data sheets; all-reduce rates as measured for A100 and H100 (Vidur's
profiles), scaled for the rest; prices from the papers or public lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.scheduler.problem.problem import Problem

Document = dict[str, Any]


def _gpu(tflops: float, hbm_gb: float, hbm_gbps: float, bus_gbps: float, latency_us: float) -> Document:
    return {
        "tflops_bf16": tflops,
        "hbm_GB": hbm_gb,
        "hbm_GBps": hbm_gbps,
        "ar_bus_GBps": bus_gbps,
        "ar_latency_us": latency_us,
    }


GPUS: Mapping[str, Document] = {
    "H200": _gpu(989.5, 141, 4800, 340, 10),
    "H100": _gpu(989.5, 80, 3350, 340, 10),
    "H800": _gpu(989.5, 80, 3350, 150, 10),
    "H20": _gpu(148, 96, 4000, 340, 10),
    "A100-80": _gpu(312, 80, 2039, 155, 12),
    "A100-40": _gpu(312, 40, 1555, 155, 12),
    "L40S": _gpu(362, 48, 864, 20, 25),
    "L4": _gpu(121, 24, 300, 12, 25),
    "A40": _gpu(149.7, 48, 696, 40, 25),
    "RTX4090": _gpu(165.2, 24, 1008, 10, 25),
    "V100": _gpu(125, 32, 900, 100, 12),
    "T4": _gpu(65, 16, 320, 8, 25),
}
PRICES: Mapping[str, float] = {"H800": 5.28, "H20": 1.85, "A100-40": 4.10, "L40S": 3.77, "L4": 1.67}


def _model(params: float, layers: int, hidden: int, heads: tuple[int, int], vocab: int, **more: object) -> Document:
    shape = {"params": params, "layers": layers, "hidden": hidden, "q_heads": heads[0], "kv_heads": heads[1]}
    return {**shape, "head_dim": 128, "vocab": vocab, **more}


MODELS: Mapping[str, Document] = {
    "qwen2.5-1.5b": _model(1.777e9, 28, 1536, (12, 2), 151_936, ffn=8960),
    "qwen2.5-7b": _model(7.616e9, 28, 3584, (28, 4), 152_064, ffn=18944),
    "qwen2.5-14b": _model(14.77e9, 48, 5120, (40, 8), 152_064, ffn=13824),
    "qwen2.5-32b": _model(32.76e9, 64, 5120, (40, 8), 152_064),
    "qwen2.5-72b": _model(72.7e9, 80, 8192, (64, 8), 152_064),
    "qwen3-4b": _model(4.02e9, 36, 2560, (32, 8), 151_936, ffn=9728, tied_embeddings=True),
    "qwen3-8b": _model(8.19e9, 36, 4096, (32, 8), 151_936, ffn=12288),
    "qwen3-14b": _model(14.77e9, 40, 5120, (40, 8), 151_936, ffn=17408),
    "llama-7b": _model(6.74e9, 32, 4096, (32, 32), 32_000),
    "llama-8b": _model(8.03e9, 32, 4096, (32, 8), 128_256),
    "llama-70b": _model(70.6e9, 80, 8192, (64, 8), 128_256),
    "gpt-j-6b": _model(6.05e9, 28, 4096, (16, 16), 50_400, head_dim=256),
}

# Read from StreamRL's Figure 7: shares of samples in bins of 635.2 tokens from 828 on.
_STREAMRL = (
    "125 169 121 116 77 61.5 52.7 30.3 33.2 21.5 15.6 22.4 15.6 4.9 6.8 3.9 6.8 2.9 12.7 7.8 7.8 19.5 5.9 6.8 7.8 10.7 "
    "8.8 10.7 5.9 8.8"
)
ACTOR = {"name": "actor_train", "kind": "train"}
GRPO_TASKS = ({"name": "prox_logp", "kind": "infer", "shares_weights": True}, ACTOR)
PPO_TASKS = (
    {"name": "ref_logp", "kind": "infer"},
    {"name": "critic_infer", "kind": "infer", "shares_weights": True},
    {"name": "critic_train", "kind": "train"},
    ACTOR,
)


def streamrl_lengths(scale: float = 1.0) -> Document:
    """StreamRL's lengths of at most 20K tokens; halved and quartered they are its 10K and 5K sets."""
    return {
        "type": "histogram",
        "start": 828 * scale,
        "width": 635.2 * scale,
        "max": 19_884 * scale,
        "fractions": [float(share) for share in _STREAMRL.split()],
    }


def lognormal(median: float, sigma: float, longest: float) -> Document:
    """Clipped lognormal lengths."""
    return {"type": "lognormal", "median": median, "sigma": sigma, "max": longest}


def machines(gpu: str, count: int, *, region: str = "r0", nic_gbps: float = 1600, gpus: int = 8) -> Document:
    """Equal machines, named after their GPU."""
    return {
        "name": gpu.lower() if region == "r0" else f"{gpu.lower()}-{region}",
        "gpu": gpu,
        "gpus": gpus,
        "count": count,
        "region": region,
        "nic_Gbps": nic_gbps,
        "price_per_gpu_hour": PRICES.get(gpu, 0.0),
    }


def make_problem(
    name: str,
    nodes: Sequence[Document],
    model: str,
    *,
    workload: Document,
    links: Sequence[Document] = (),
    **more: Any,
) -> Problem:
    """A problem over these machines; `more` are further keys of the schema."""
    used = {node["gpu"] for node in nodes}
    document = {
        "id": name,
        "gpu_types": {gpu: spec for gpu, spec in GPUS.items() if gpu in used},
        "nodes": list(nodes),
        "links": list(links),
        "model": {"name": model, **MODELS[model]},
        "workload": workload,
        **more,
    }
    return Problem.model_validate(document)


def streamrl(model: str, nodes: Sequence[Document], *, scale: float = 1.0, **more: Any) -> Problem:
    """StreamRL's evaluation: PPO with four models of equal size, 1,024 samples a step, one step behind."""
    workload = {
        "prompts_per_step": 1024,
        "prompt_len": 390,
        "output_len": streamrl_lengths(scale),
        "staleness": 1,
        "train_tasks": PPO_TASKS,
    }
    constraints = {"max_tp": 8, "tail_blocking": True}
    return make_problem(f"streamrl-{model}", nodes, model, workload=workload, constraints=constraints, **more)


def areal(model: str, nodes: Sequence[Document], *, prompts: int = 512, staleness: int = 8, **more: Any) -> Problem:
    """AReaL's evaluation: GRPO with sixteen answers of up to 27,648 tokens; the distribution of lengths is assumed."""
    workload = {
        "prompts_per_step": prompts,
        "group_size": 16,
        "prompt_len": 250,
        "output_len": lognormal(7000, 0.8, 27_648),
        "staleness": staleness,
        "train_tasks": GRPO_TASKS,
    }
    more.setdefault("constraints", {"max_tp": 8})
    return make_problem(f"areal-{model}", nodes, model, workload=workload, **more)
