"""Probes as if machines had been measured, and a model's folder that can be planned for; no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from console.probe.probe_file import Probe, write_probe

GPU = {"type": "gpu", "kind": "A100-80", "count": 8, "memory_GB": 85.9}


def document(name: str = "gpu-1", **changes: Any) -> dict[str, Any]:
    """A probe of eight A100 as JSON."""
    found = {
        "schema": "penstock-probe/1",
        "name": name,
        "site": "here",
        "measured_at": "2026-01-02T03:04:05Z",
        "accelerators": GPU,
        "matrix_tflops_bf16": 250.0,
        "memory_GBps": 1700.0,
        "allreduce": {"backend": "nccl", "bus_GBps": 220.0, "latency_us": 20.0},
        "load": {"load_average": 0.1, "others": 0.0, "stolen": 0.0},
    }
    return {**found, **changes}


def host(name: str = "desk", **changes: Any) -> dict[str, Any]:
    """A probe of a machine without GPUs."""
    measured = {"matrix_tflops_bf16": None, "memory_GBps": None, "allreduce": None}
    return {**document(name), **measured, "accelerators": None, "cores": 16, "memory_GB": 64.0, **changes}


def reward(rate: float = 50.0, **changes: Any) -> dict[str, Any]:
    """A measured reward: samples/s of a worker."""
    found = {"model": "code", "samples_per_second": rate, "num_samples": 500, "completions": "recorded"}
    return {**found, "memory_GB": 1.5, **changes}


def link(machine: str, site: str, *, gbps: float = 5.0) -> dict[str, Any]:
    """A measured link; it receives faster than it sends."""
    rates = {"send_Gbps": gbps, "receive_Gbps": 2 * gbps, "round_trip_ms": 30.0}
    return {"machine": machine, "site": site, **rates, "clock_ahead_s": 0.5}


def write(folder: Path, *documents: dict[str, Any]) -> Path:
    """An inventory."""
    for each in documents:
        write_probe(folder, Probe.model_validate(each))
    return folder


def make_model(folder: Path) -> Path:
    """A Hugging Face folder with config.json and weights of that shape: two layers, four query heads, two others."""
    hidden, ffn, vocab, keys = 64, 128, 96, 32
    folder.mkdir()
    config = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for index in range(2):
        layer = f"model.layers.{index}"
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"}
        tensors |= {f"{layer}.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        tensors |= {f"{layer}.mlp.down_proj.weight": (hidden, ffn)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, folder / "model.safetensors")
    return folder
