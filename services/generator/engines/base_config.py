"""Defines the keys and properties common to all engines; each engine adds its own keys in a subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

import penstock
from penstock.config import StrictModel
from penstock.model.adapter_layout import MAX_RANK
from penstock.process.packages import installed_version
from penstock.storage.addresses import StoredPath
from penstock.storage.fetched import fetched
from services.generator.emulation.config import EmulatedConfig
from services.generator.engine.engine import Engine, UpdateMode

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class ServedModel(StrictModel):
    """The parts of a generator's configuration that engines read besides their own."""

    model_path: StoredPath
    """Hugging Face directory of the initial model and its tokenizer, or its address: s3://, gs://, file://."""
    dtype: DtypeName = "auto"
    """Element type of the engine's weights."""
    max_lora_rank: int | None = Field(default=None, ge=1, le=MAX_RANK)
    """Highest rank of the LoRA adapters it is sent, for runs that train one; unset: whole models."""
    records_routes: bool = False
    """Whether the engine records which experts the routers choose, for runs with algorithm.routing_replay."""
    seed: int = 0
    """Seed of the engine's own sampling, used where a prompt brings none."""
    emulated: EmulatedConfig = EmulatedConfig()
    """The hardware that the engine `emulated` emulates."""

    @property
    def model_folder(self) -> Path:
        """The directory on this machine, fetched at the first use if it has an address; raises as `fetched` does."""
        return fetched("model_path", self.model_path, "model")


class BaseEngineConfig(StrictModel, ABC):
    """The engine, and how much of the machine it may use."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Alternative packages, of which it needs one; imported by the name of the first."""
    is_emulated: ClassVar[bool] = False
    """Whether it only emulates GPUs: it needs no GPU and no tokenizer, and several can share a process."""
    has_tensor_parallel: ClassVar[bool] = True
    has_pipeline_stages: ClassVar[bool] = False
    can_record_routes: ClassVar[bool] = False
    """Whether it can record the experts of each token."""

    engine: str
    """vllm; transformers where vllm cannot be installed; emulated for emulated GPUs."""
    max_concurrent_samples: int = Field(default=128, ge=1, le=8192)
    """Maximum number of samples that one generator decodes at once."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Longest prompt + completion; the model's own limit when unset."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of the engine; matters only when it decodes on a CPU."""
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """GPUs per model replica, or per pipeline stage of it; not for transformers."""
    pipeline_parallel: int = Field(default=1, ge=1, le=1024)
    """Pipeline stages of one model replica, each of `tensor_parallel` GPUs; vllm only."""
    max_silence_s: float = Field(default=120.0, gt=0, le=3600)
    """An engine counts as hung if it samples no token for this long while requests are waiting, or installs no tensor
    of a version being loaded: the process then returns its leases and exits, to be restarted."""
    update_mode: UpdateMode = UpdateMode.KEEP
    """Samples under way during a weight update: keep (continue on the old KV cache), recompute (the cache), drain."""
    max_drain_s: float | None = Field(default=None, gt=0)
    """With drain, how long samples under way may take to end before they are resumed and the update is retried.
    Unset: 300 s, or three times what the longest may still take at the engine's speed, if that is more."""

    @model_validator(mode="after")
    def _can_be_spread(self) -> Self:
        if self.tensor_parallel > 1 and not self.has_tensor_parallel:
            degree = self.tensor_parallel
            raise ValueError(f"tensor_parallel: {degree} GPUs need the vllm engine, not {self.engine}; leave it 1")
        if self.pipeline_parallel > 1 and not self.has_pipeline_stages:
            stages = self.pipeline_parallel
            raise ValueError(f"pipeline_parallel: {stages} stages need the vllm engine, not {self.engine}; leave it 1")
        return self

    @abstractmethod
    def build(self, model: ServedModel) -> Engine:
        """The engine, not started; imports its libraries only now. Raises ValueError if it cannot be built."""

    @classmethod
    def version(cls) -> str:
        """Version of the engine's package, or Penstock's own if it needs none."""
        return installed_version(*cls.packages) or penstock.__version__

    @classmethod
    def decodes_on_cpus(cls) -> bool:
        """Whether the installed package decodes on CPUs, in a process that needs cores of its own."""
        return False

    @classmethod
    def decodes_on_gpus(cls) -> bool:
        """Whether the installed package decodes on GPUs, `tensor_parallel` x `pipeline_parallel` of them."""
        return False
