"""Settings of a generator process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config import StrictModel, Targets

EngineName = Literal["vllm", "transformers", "emulated"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(StrictModel):
    """What decodes, and how much of the machine it may take."""

    engine: EngineName = "vllm"
    """vllm; transformers where vllm does not install; emulated for pretend GPUs."""
    max_concurrent_samples: int = Field(default=128, ge=1, le=8192)
    """Most samples decoded at once by one generator."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Longest prompt + completion; the model's own limit when unset."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of the engine; matters only where it decodes on a CPU."""
    kv_cache_gib: float = Field(default=1.0, gt=0, le=4096)
    """KV cache of a CPU engine, GiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Part of each GPU's memory the engine may take."""
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """GPUs one model replica is spread over."""
    emulated_tokens_per_second: float = Field(default=2000.0, gt=0)
    """Speed of an emulated engine, all samples together."""
    emulated_mean_tokens: int = Field(default=45, ge=1)
    """Mean completion length of an emulated engine."""


class GeneratorConfig(StrictModel):
    """A generator: leases prompts of one run, decodes them, swaps weights in flight."""

    listen: str = "127.0.0.1:7302"
    """Address of its GeneratorService, host:port."""
    generator_id: str = "gen-0"
    """Its name in status and logs; each start of the process adds a suffix of its own."""
    site: str = ""
    """Where it stands; empty is the default site."""
    run_id: str
    """The run it works for."""
    broker: Targets = "127.0.0.1:7301"
    """The broker, host:port; several on one Redis as a list, of which the first that works is used."""
    weights: str = "127.0.0.1:7304"
    """The weight store (the trainer), host:port."""
    model_path: Path
    """Hugging Face directory of the initial model and its tokenizer."""
    dtype: DtypeName = "auto"
    """Element type of the engine's weights."""
    seed: int = 0
    """Seed of the engine's own sampling, used where a prompt brings none."""
    engine: EngineConfig = EngineConfig()
    """The engine."""
    flush_interval_s: float = Field(default=0.2, gt=0, le=10)
    """Longest time a decoded token waits before it is sent."""
    cache_dir: Path
    """Folder for fetched weights; only the newest versions are kept."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the Prometheus endpoint; none when unset."""
