"""Defines the vLLM engine's settings, and builds its process.

vLLM is imported inside `build_engine`, after the environment is set: it reads parts of it at import.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# About a second of a tiny model's prefill; larger models on a CPU do without seeds.
_MAX_WHOLE_PREFILL_TOKENS = 2**18
TRANSFER_BACKEND = "penstock"
"""vLLM's name for the weight-transfer engine that `worker_extension` registers."""
_SCHEDULER = "services.generator.engines.vllm.output_scheduler.HoldingScheduler"
_ASYNC_SCHEDULER = "services.generator.engines.vllm.output_scheduler.HoldingAsyncScheduler"
_WORKER_EXTENSION = "services.generator.engines.vllm.worker_extension.PenstockWorkerExtension"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of the engine; fixed while it runs."""

    model_path: Path
    """Hugging Face directory of the initial model, weights in safetensors."""
    policy_version: int = 0
    """Version of the initial model."""
    dtype: str = "auto"
    """Element type of the weights: auto, float32, bfloat16 or float16."""
    max_model_len: int | None = None
    """Longest prompt + completion; the model's own limit when unset."""
    max_num_seqs: int = 128
    """Maximum number of samples decoded at once."""
    num_threads: int = 1
    """Threads of a CPU engine; a model of a few million parameters gains nothing from a second."""
    kv_cache_gib: float = 1.0
    """KV cache size of a CPU engine."""
    gpu_memory_utilization: float = 0.9
    """Share of each GPU's memory that the engine may use."""
    tensor_parallel: int = 1
    """GPUs per pipeline stage."""
    pipeline_parallel: int = 1
    """Pipeline stages per model replica."""
    max_lora_rank: int | None = None
    """Highest adapter rank; None for whole models."""
    seed: int = 0
    """Seed of samples without their own."""
    stream_interval: int = 16
    """Steps for which the engine buffers tokens; at 1 each step costs a message and wakes every sample."""
    enable_prefix_caching: bool = True
    """Whether samples of one prompt share its KV cache; costs a few percent if prompts are short."""
    start_timeout_s: float = 600.0
    """Longest wait for the model to load."""
    update_timeout_s: float = 300.0
    """Longest pause for an update."""
    stop_timeout_s: float = 20.0
    """Longest wait for the engine process to end before it is killed."""


def build_engine(settings: VllmSettings) -> AsyncLLM:
    """Builds the engine and its process; blocks for seconds to minutes."""
    os.environ.update(quiet_environment())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    if is_cpu:
        os.environ.update(cpu_environment(settings.num_threads))
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.generator.engines.vllm.stats import StatsRecorder

    args = AsyncEngineArgs(
        model=str(settings.model_path),
        skip_tokenizer_init=True,
        load_format="safetensors",
        use_tqdm_on_load=False,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.max_model_len or _context_length(settings.model_path),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=whole_prefill_tokens(settings) if is_cpu else None,
        tensor_parallel_size=settings.tensor_parallel,
        pipeline_parallel_size=settings.pipeline_parallel,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=int(settings.kv_cache_gib * 2**30) if is_cpu else None,
        enforce_eager=is_cpu,
        enable_prefix_caching=settings.enable_prefix_caching,
        stream_interval=settings.stream_interval,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        worker_extension_cls=_WORKER_EXTENSION,
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER_BACKEND),
        **_lora_arguments(settings),
        **_kernel_arguments(is_cpu=is_cpu),
    )
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    # vLLM chooses between the two only for its own scheduler classes, so repeat its choice.
    is_async = config.scheduler_config.async_scheduling
    config.scheduler_config.scheduler_cls = _ASYNC_SCHEDULER if is_async else _SCHEDULER
    return AsyncLLM.from_vllm_config(config, stat_loggers=[StatsRecorder], disable_log_stats=True)


def _kernel_arguments(*, is_cpu: bool) -> dict[str, Any]:
    """GPU engines use compiled kernels by themselves."""
    if not is_cpu:
        return {}
    from services.generator.engines.vllm.kernels import PRIORITY

    return {"ir_op_priority": PRIORITY}


def _lora_arguments(settings: VllmSettings) -> dict[str, Any]:
    """One adapter slot: all samples decode with the newest version."""
    rank = settings.max_lora_rank
    if rank is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    # vLLM supports only certain ranks; an adapter of lower rank is padded with zeros.
    room = min(known for known in get_args(MaxLoRARanks) if known >= rank)
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1}


def whole_prefill_tokens(settings: VllmSettings) -> int | None:
    """Token budget of a step with which no prefill is ever split; None if it would be unreasonably large."""
    context = settings.max_model_len or _context_length(settings.model_path)
    if context is None or context * settings.max_num_seqs > _MAX_WHOLE_PREFILL_TOKENS:
        return None
    return context * settings.max_num_seqs


def can_seed_samples(settings: VllmSettings) -> bool:
    """Whether samples may have their own seeds.

    vLLM 0.32 rewinds a seeded sample's generator after a split prefill, which PyTorch's CPU generators do not support:
    the engine dies ("CPU Generator does not use offset"). So on a CPU, seeds need prefills that are never split.
    """
    from vllm.platforms import current_platform

    return not current_platform.is_cpu() or whole_prefill_tokens(settings) is not None


def quiet_environment() -> dict[str, str]:
    """Keeps vLLM off the network (models are directories, and usage reports are off) and quiet."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # In the engine process: torch's and vLLM's warnings to their own developers.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def cpu_environment(num_threads: int) -> dict[str, str]:
    """Settings of a CPU engine; measured with a 2 M parameter model on two shared cores."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        # Spinning threads of several processes on few cores halve each other's speed.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Decode in the engine process itself: a separate worker process spins on shared memory, which cost half the
        # tokens per CPU second and a quarter of a core while idle.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM compiles one small function even in eager mode: 20 s at the first token, for no gain here.
        "TORCHDYNAMO_DISABLE": "1",
    }


def _context_length(model_path: Path) -> int | None:
    """The model's own limit; None leaves it to vLLM, which knows more configuration keys."""
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) else None
