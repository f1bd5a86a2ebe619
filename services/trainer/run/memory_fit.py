"""Decides at the start of a run, before the model is loaded, how it fits the memory of its processes' devices.

- Each process compares what its part needs, by the formulas of `penstock.model.training_memory`, with its own memory;
  all decide alike, by the one with the least room.
- A run is refused only if what it holds all the time exceeds that memory; all else is a warning, and is tried.
"""

from __future__ import annotations

from dataclasses import replace

import structlog
import torch

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import ModelShape, TrainingMode, held_bytes, published_bytes, working_bytes
from services.trainer.config import TrainingConfig
from services.trainer.distributed.memory_share import memory_share
from services.trainer.distributed.stages import divided
from services.trainer.model.backend import BackendError
from services.trainer.model.precision import compute_dtype
from services.trainer.model.ranks import Ranks

USABLE = 0.9
"""Of a device's memory: libraries and what an allocator cannot use take the rest."""
_MOST = 2**62
_log = structlog.get_logger()


def recomputes_activations(config: TrainingConfig, ranks: Ranks) -> bool:
    """Whether layers compute their activations again in the backward pass; called by all processes.

    Args:
        config: Of the run; `trainer.gradient_checkpointing` if it is set.
        ranks: The processes.

    Raises:
        BackendError: A process cannot hold its part of the model, or the model cannot be cut into the stages asked for.
        OSError: The directory does not hold a model.
    """
    device = ranks.device(config.trainer.device)
    memory = _device_bytes(device, ranks)
    shape, problem = _shape(config)
    if not ranks.agree(shape is not None):
        _log.warning("the model's memory is not known", problem=problem)
        return config.trainer.gradient_checkpointing or False
    assert shape is not None
    is_half = compute_dtype(config.model.dtype, path=config.model.path, device=device) == torch.bfloat16
    shape = _stage_shape(config, shape, ranks).split(ranks.num_splits)
    mode = training_mode(config, num_shards=ranks.num_shards, is_half=is_half, is_on_cpus=device.type == "cpu")
    held = held_bytes(shape, mode)
    # On CPUs the processes of a machine share its memory: more of them on the same one have no more.
    spread = "raise trainer.processes" if device.type == "cuda" else "spread trainer.processes over more machines"
    needed, available = _least_room(ranks, held, memory)
    if needed > available:
        raise BackendError(
            f"model.path: a process of {ranks.num_ranks} needs {needed / 1e9:.1f} GB to hold its part of "
            f"{config.model.path}, and {available / 1e9:.1f} GB are available to it; {spread}"
            + ("" if mode.has_adapter else ", or train an adapter (lora)")
        )
    # Copies of published weights are in the machine's memory, which is the device's own only on CPUs.
    held += published_bytes(shape, mode) if mode.is_on_cpus else 0
    tightest = [
        _least_room(ranks, held + working_bytes(shape, replace(mode, checkpoints_layers=is_so)), USABLE * memory)
        for is_so in (False, True)
    ]
    (whole, most), (least, _) = tightest
    given = config.trainer.gradient_checkpointing
    recomputes = whole > most if given is None else given
    if ranks.rank == 0:
        _log.info(
            "memory of each process",
            gradient_checkpointing=recomputes,
            is_chosen=given is None,
            GB_usable=round(most / 1e9, 2),
            GB_with_all_activations=round(whole / 1e9, 2),
            GB_with_checkpointing=round(least / 1e9, 2),
            tokens_per_pack=mode.pack_tokens,
        )
        needed, most = tightest[recomputes]
        if needed > most:
            _log.warning(
                "memory may not suffice",
                GB_needed=round(needed / 1e9, 2),
                GB_usable=round(most / 1e9, 2),
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


def _least_room(ranks: Ranks, needed: float, available: float) -> tuple[int, int]:
    """What the process with the least room needs, and what it has; the same in all of them, which call this."""
    own = int(available) - int(needed)
    room = ranks.smallest(own)
    tightest = ranks.smallest(int(needed) if own == room else _MOST)
    return tightest, tightest + room


def _stage_shape(config: TrainingConfig, shape: ModelShape, ranks: Ranks) -> ModelShape:
    """The part of the model that this process' stage is."""
    stages = divided(
        shape.num_layers,
        num_stages=ranks.num_stages,
        layers_per_stage=config.trainer.parallel.layers_per_stage,
        model=config.model.path,
    )
    index = ranks.stage_index
    return shape.stage(len(stages[index]), is_first=index == 0, is_last=index == len(stages) - 1)


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
