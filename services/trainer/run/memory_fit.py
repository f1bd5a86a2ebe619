"""Decides at the start of a run, before the model is loaded, how it fits the memory of its processes' devices.

- All processes decide alike, by the smallest memory and the formulas of `penstock.model.training_memory`.
- A run is refused only if what it holds all the time exceeds that memory; all else is a warning, and is tried.
"""

from __future__ import annotations

import math
from dataclasses import replace

import structlog
import torch

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import ModelShape, TrainingMode, held_bytes, published_bytes, working_bytes
from services.trainer.config import TrainingConfig
from services.trainer.distributed.memory_share import memory_share
from services.trainer.model.backend import BackendError
from services.trainer.model.precision import compute_dtype
from services.trainer.model.ranks import Ranks

USABLE = 0.9
"""Of a device's memory: libraries and what an allocator cannot use take the rest."""
_log = structlog.get_logger()


def recomputes_activations(config: TrainingConfig, ranks: Ranks) -> bool:
    """Whether layers compute their activations again in the backward pass; called by all processes.

    Args:
        config: Of the run; `trainer.gradient_checkpointing` if it is set.
        ranks: The processes.

    Raises:
        BackendError: A process cannot hold its part of the model.
        OSError: The directory does not hold a model.
    """
    device = ranks.device(config.trainer.device)
    memory = ranks.smallest(_device_bytes(device, ranks))
    shape, problem = _shape(config)
    if not ranks.agree(shape is not None):
        _log.warning("the model's memory is not known", problem=problem)
        return config.trainer.gradient_checkpointing or False
    assert shape is not None
    is_half = compute_dtype(config.model.dtype, path=config.model.path, device=device) == torch.bfloat16
    # Stages hold as many parts as the one with the most layers fits into the model.
    num_parts = ranks.num_shards * max(1, shape.num_layers // _most_layers(config, shape))
    mode = training_mode(config, num_shards=num_parts, is_half=is_half, is_on_cpus=device.type == "cpu")
    held, most = held_bytes(shape, mode), USABLE * memory
    # On CPUs the processes of a machine share its memory: more of them on the same one have no more.
    spread = "raise trainer.processes" if device.type == "cuda" else "spread trainer.processes over more machines"
    if held > memory:
        raise BackendError(
            f"model.path: each of {ranks.num_ranks} processes needs {held / 1e9:.1f} GB to hold its part of "
            f"{config.model.path}, and {memory / 1e9:.1f} GB are available to it; {spread}"
            + ("" if mode.has_adapter else ", or train an adapter (lora)")
        )
    # Copies of published weights are in the machine's memory, which is the device's own only on CPUs.
    held += published_bytes(shape, mode) if mode.is_on_cpus else 0
    whole, least = (
        held + working_bytes(shape, replace(mode, checkpoints_layers=recomputes)) for recomputes in (False, True)
    )
    given = config.trainer.gradient_checkpointing
    recomputes = whole > most if given is None else given
    if ranks.rank == 0:
        _log.info(
            "memory of each process",
            gradient_checkpointing=recomputes,
            is_chosen=given is None,
            GB_available=round(memory / 1e9, 2),
            GB_with_all_activations=round(whole / 1e9, 2),
            GB_with_checkpointing=round(least / 1e9, 2),
            tokens_per_pack=mode.pack_tokens,
        )
        if (needed := least if recomputes else whole) > most:
            _log.warning(
                "memory may not suffice",
                GB_needed=round(needed / 1e9, 2),
                GB_available=round(memory / 1e9, 2),
                fixes=f"{spread}; lower trainer.tokens_per_pack; train an adapter (lora)",
            )
    return recomputes


def training_mode(config: TrainingConfig, *, num_shards: int, is_half: bool, is_on_cpus: bool) -> TrainingMode:
    """How a run trains, as far as memory depends on it, with all activations kept."""
    has_adapter = config.lora is not None
    return TrainingMode(
        num_shards=num_shards,
        # A longer sample has a pack of its own.
        pack_tokens=max(config.trainer.tokens_per_pack, config.data.max_prompt_tokens + config.sampling.max_new_tokens),
        is_half=is_half,
        has_reference=config.algorithm.kl_coefficient > 0 and not has_adapter,
        has_critic=config.algorithm.definition.has_critic,
        has_adapter=has_adapter,
        is_on_cpus=is_on_cpus,
    )


def _most_layers(config: TrainingConfig, shape: ModelShape) -> int:
    """Layers of the largest stage."""
    parallel = config.trainer.parallel
    return max(parallel.layers_per_stage or (math.ceil(shape.num_layers / parallel.pipeline),))


def _shape(config: TrainingConfig) -> tuple[ModelShape | None, str]:
    try:
        return read_shape(config.model.path), ""
    except (OSError, ValueError) as error:
        return None, str(error)


def _device_bytes(device: torch.device, ranks: Ranks) -> int:
    """Memory for this process: its GPU's, or its share of what its machine still has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_share(ranks.num_ranks)
