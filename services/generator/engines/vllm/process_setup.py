"""Builds the vLLM engine's process from the configuration.

vLLM is imported inside `build_engine`, after the environment is set: it reads parts of it at import.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, get_args

from penstock.model.model_folder import model_size
from services.generator.engines.base_config import ServedModel
from services.generator.engines.vllm.config import VllmEngineConfig

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# About a second of a tiny model's prefill; larger models on a CPU do without seeds.
_MAX_WHOLE_PREFILL_TOKENS = 2**18
TRANSFER_BACKEND = "penstock"
"""vLLM's name for the weight-transfer engine that `worker_extension` registers."""
RECORDS_ROUTES = "penstock_records_routes"
"""Key of vLLM's additional configuration: whether the scheduler takes routes from a worker's `route_recording`."""
_SCHEDULER = "services.generator.engines.vllm.output_scheduler.HoldingScheduler"
_ASYNC_SCHEDULER = "services.generator.engines.vllm.output_scheduler.HoldingAsyncScheduler"
_WORKER_EXTENSION = "services.generator.engines.vllm.worker.worker_extension.PenstockWorkerExtension"


def build_engine(config: VllmEngineConfig, model: ServedModel, *, stream_interval: int) -> AsyncLLM:
    """Builds the engine and its process, which buffers tokens for `stream_interval` steps; blocks for minutes."""
    os.environ.update(quiet_environment())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    if is_cpu:
        os.environ.update(cpu_environment(config.num_threads))
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.generator.engines.vllm.stats import StatsRecorder

    args = AsyncEngineArgs(
        model=str(model.model_folder),
        skip_tokenizer_init=True,
        load_format="safetensors",
        use_tqdm_on_load=False,
        dtype=model.dtype,
        seed=model.seed,
        max_model_len=_context_tokens(config, model),
        max_num_seqs=config.max_concurrent_samples,
        max_num_batched_tokens=whole_prefill_tokens(config, model) if is_cpu else None,
        tensor_parallel_size=config.tensor_parallel,
        pipeline_parallel_size=config.pipeline_parallel,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) if is_cpu else None,
        enforce_eager=is_cpu,
        enable_prefix_caching=True,
        stream_interval=stream_interval,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        worker_extension_cls=_WORKER_EXTENSION,
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER_BACKEND),
        **_lora_arguments(model.max_lora_rank),
        **_route_arguments(model, is_cpu=is_cpu),
        **_kernel_arguments(is_cpu=is_cpu),
    )
    built = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    # vLLM chooses between the two only for its own scheduler classes, so repeat its choice.
    is_async = built.scheduler_config.async_scheduling
    built.scheduler_config.scheduler_cls = _ASYNC_SCHEDULER if is_async else _SCHEDULER
    return AsyncLLM.from_vllm_config(built, stat_loggers=[StatsRecorder], disable_log_stats=True)


def _kernel_arguments(*, is_cpu: bool) -> dict[str, Any]:
    """GPU engines use compiled kernels by themselves."""
    if not is_cpu:
        return {}
    from services.generator.engines.vllm.kernels import PRIORITY

    return {"ir_op_priority": PRIORITY}


def _route_arguments(model: ServedModel, *, is_cpu: bool) -> dict[str, Any]:
    """On a CPU vLLM refuses its own option, since the model runner lacks it; `route_recording` has that part."""
    if not model.records_routes:
        return {}
    return {"additional_config": {RECORDS_ROUTES: True}} if is_cpu else {"enable_return_routed_experts": True}


def _lora_arguments(rank: int | None) -> dict[str, Any]:
    """One adapter slot: all samples decode with the newest version."""
    if rank is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    # vLLM supports only certain ranks; an adapter of lower rank is padded with zeros.
    room = min(known for known in get_args(MaxLoRARanks) if known >= rank)
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1}


def whole_prefill_tokens(config: VllmEngineConfig, model: ServedModel) -> int | None:
    """Token budget of a step with which no prefill is ever split; None if it would be unreasonably large."""
    context = _context_tokens(config, model)
    if context is None or context * config.max_concurrent_samples > _MAX_WHOLE_PREFILL_TOKENS:
        return None
    return context * config.max_concurrent_samples


def can_seed_samples(config: VllmEngineConfig, model: ServedModel) -> bool:
    """Whether samples may have their own seeds.

    vLLM 0.32 rewinds a seeded sample's generator after a split prefill, which PyTorch's CPU generators do not support:
    the engine dies ("CPU Generator does not use offset"). So on a CPU, seeds need prefills that are never split.
    """
    from vllm.platforms import current_platform

    return not current_platform.is_cpu() or whole_prefill_tokens(config, model) is not None


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


def _context_tokens(config: VllmEngineConfig, model: ServedModel) -> int | None:
    """The model's own limit unless configured; None leaves it to vLLM, which knows more configuration keys."""
    return config.max_context_tokens or model_size(model.model_folder, "max_position_embeddings")
