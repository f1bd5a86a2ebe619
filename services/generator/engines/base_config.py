"""What every engine is configured with, and what it says of itself; each engine adds its own keys in a class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator

from penstock.config import StrictModel
from services.generator.emulation.config import EmulatedConfig
from services.generator.engine.engine import Engine, UpdateMode

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class ServedModel(Protocol):
    """What engines read of a generator's configuration beside their own."""

    @property
    def model_path(self) -> Path:
        """Hugging Face directory of the initial model."""

    @property
    def dtype(self) -> DtypeName:
        """Element type of the weights."""

    @property
    def max_lora_rank(self) -> int | None:
        """Highest rank of adapters; None: whole models."""

    @property
    def seed(self) -> int:
        """Seed of samples that bring none."""

    @property
    def emulated(self) -> EmulatedConfig:
        """What an emulated engine emulates."""


class BaseEngineConfig(StrictModel, ABC):
    """What decodes, and how much of the machine it may take."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages it needs, any one of them; imported by the first one's name."""
    is_emulated: ClassVar[bool] = False
    """Whether it only emulates GPUs: it needs neither a GPU nor a tokenizer, and several share a process."""
    has_pipeline_stages: ClassVar[bool] = False

    engine: str
    """vllm; transformers where vllm does not install; emulated for emulated GPUs."""
    max_concurrent_samples: int = Field(default=128, ge=1, le=8192)
    """Most samples decoded at once by one generator."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Longest prompt + completion; the model's own limit when unset."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of the engine; matters only where it decodes on a CPU."""
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """GPUs one model replica, or one pipeline stage of it, is spread over."""
    pipeline_parallel: int = Field(default=1, ge=1, le=1024)
    """Pipeline stages of one model replica, each of `tensor_parallel` GPUs; vllm only."""
    max_silence_s: float = Field(default=120.0, gt=0, le=3600)
    """An engine counts as hung when it samples no token for this long while samples are waited for, or installs no
    tensor of the version it is taking: the process gives everything back and ends, to be started again."""
    update_mode: UpdateMode = UpdateMode.KEEP
    """Samples under way when a version is taken: keep (go on over the old KV cache), recompute (it first), drain."""
    max_drain_s: float | None = Field(default=None, gt=0)
    """With drain, how long samples under way may take to end before they are let go on and the version is tried again.
    Unset: 300 s, or three times what the longest of them may still take at the engine's speed, where that is more."""

    @model_validator(mode="after")
    def _has_its_pipeline_stages(self) -> Self:
        if self.pipeline_parallel > 1 and not self.has_pipeline_stages:
            stages = self.pipeline_parallel
            raise ValueError(f"pipeline_parallel: {stages} stages need the vllm engine, not {self.engine}; leave it 1")
        return self

    @abstractmethod
    def build(self, model: ServedModel) -> Engine:
        """The engine, not started; imports what it needs only now. Raises ValueError where it cannot be built."""

    @classmethod
    def decodes_on_cpus(cls) -> bool:
        """Whether the package that is installed decodes on CPUs, in a process that is to have cores of its own."""
        return False
