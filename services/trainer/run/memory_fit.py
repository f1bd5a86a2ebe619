"""Decides at the start of a run, before the model is loaded, how it fits the memory of its processes' devices.

- Each process compares what its part needs, by the formulas of `penstock.model.training_memory`, with its own memory;
  all decide alike, by the one with the least room.
- A run is refused only if what it holds all the time exceeds that memory; all else is a warning, and is tried.
- What is not set is chosen: activations computed again if they do not fit, then weights and optimiser in the machine's
  memory if it has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
import torch

from penstock.model.adapter_memory import adapter_params, packed_layer_bytes, unpacked_bytes
from penstock.model.decoder_shape import ModelShape
from penstock.model.model_shape import read_shape
from penstock.model.training_memory import (
    TrainingMode,
    held_bytes,
    offloaded_bytes,
    published_bytes,
    working_bytes,
)
from services.trainer.config import TrainingConfig
from services.trainer.distributed.memory_share import memory_share
from services.trainer.distributed.stages import divided
from services.trainer.model.backend import BackendError
from services.trainer.model.precision import compute_dtype
from services.trainer.model.ranks import Ranks
from services.trainer.run_sections import LoraSection

USABLE = 0.9
"""Of a device's memory: libraries and what an allocator cannot use take the rest."""
_MOST = 2**62
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """How a run fits."""

    recomputes: bool
    """Layers compute their activations again in the backward pass."""
    offloads: bool
    """Weights, gradients and optimiser rest in the machine's memory."""


def fit_memory(config: TrainingConfig, ranks: Ranks) -> MemoryFit:
    """Chooses what `trainer.gradient_checkpointing` and `trainer.offload` leave open; called by all processes.

    Offload comes last: each step then moves all weights and gradients between machine and device.

    Raises:
        BackendError: A process cannot hold its part of the model, or the model cannot be cut into the stages asked for,
            or offload is asked for on CPUs.
        OSError: The directory does not hold a model.
    """
    device = ranks.device(config.trainer.device)
    given = config.trainer.gradient_checkpointing, config.trainer.offload
    if config.trainer.offload and device.type == "cpu":
        raise BackendError(
            "trainer.offload: true, and this trainer computes on CPUs: weights and optimiser rest in the machine's "
            "memory already; leave it unset, or train on a GPU"
        )
    shape, problem = _shape(config)
    if not ranks.agree(shape is not None):
        _log.warning("the model's memory is not known", problem=problem)
        return MemoryFit(recomputes=given[0] or False, offloads=given[1] or False)
    assert shape is not None
    is_half = compute_dtype(config.model.dtype, path=config.model.folder, device=device) == torch.bfloat16
    shape = _stage_shape(config, shape, ranks).split(ranks.num_splits)
    mode = training_mode(config, shape, num_shards=ranks.num_shards, is_half=is_half, is_on_cpus=device.type == "cpu")
    can_offload = device.type == "cuda" and config.offload_obstacle is None
    memory = _device_bytes(device, ranks)
    open_offload = (False, True) if can_offload else (False,)
    tries = [
        _tried(shape, replace(mode, checkpoints_layers=recomputes, offloads=offloads), ranks, memory=memory)
        for offloads in (open_offload if given[1] is None else (given[1],))
        for recomputes in ((False, True) if given[0] is None else (given[0],))
    ]
    # Where nothing fits, the least of those that at least hold the model is tried.
    able = [each for each in tries if each.holds]
    if not able:
        raise BackendError(_refusal(config, tries, num_ranks=ranks.num_ranks))
    chosen = next((each for each in able if each.fits), able[-1])
    if ranks.rank == 0:
        _report(chosen, tries, config)
    return MemoryFit(recomputes=chosen.mode.checkpoints_layers, offloads=chosen.mode.offloads)


def training_mode(
    config: TrainingConfig, shape: ModelShape, *, num_shards: int, is_half: bool, is_on_cpus: bool
) -> TrainingMode:
    """How a run trains a model, or a process' part of it, as far as memory depends on it, with all activations kept."""
    has_adapter = config.lora is not None
    mode = TrainingMode(
        num_shards=num_shards,
        # A longer sample has a pack of its own.
        pack_tokens=max(config.trainer.tokens_per_pack, config.data.max_prompt_tokens + config.sampling.max_new_tokens),
        is_half=is_half,
        num_expert_shards=config.trainer.parallel.expert,
        is_stage=config.trainer.parallel.pipeline > 1,
        has_reference=config.algorithm.has_trainer_reference and not has_adapter,
        has_critic=config.algorithm.has_trainer_critic,
        has_adapter=has_adapter,
        is_on_cpus=is_on_cpus,
    )
    return mode if config.lora is None else with_adapter(mode, config.lora, shape)


def with_adapter(mode: TrainingMode, lora: LoraSection, shape: ModelShape) -> TrainingMode:
    """The same with the adapter's numbers, and a base in 4 bits if it has one."""
    mode = replace(mode, num_adapted=adapter_params(shape, rank=lora.rank, target_modules=lora.target_modules))
    if lora.base == "auto":
        return mode
    return replace(
        mode,
        packed_layer_bytes=packed_layer_bytes(shape, weight_bytes=mode.weight_bytes),
        unpacked_bytes=unpacked_bytes(shape, weight_bytes=mode.weight_bytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """What a way to train needs and has, bytes, in the process with the least room for it."""

    mode: TrainingMode
    held: tuple[int, int]
    """All the time, on the device."""
    peak: tuple[int, int]
    """In a step, on the device, of what a run may use."""
    offloaded: tuple[int, int]
    """In the machine's memory, where something is moved there."""

    @property
    def holds(self) -> bool:
        """Whether every process can hold its part."""
        return all(needed <= available for needed, available in (self.held, self.offloaded))

    @property
    def fits(self) -> bool:
        """Whether a step fits as well."""
        needed, available = self.peak
        return self.holds and needed <= available


def _tried(shape: ModelShape, mode: TrainingMode, ranks: Ranks, *, memory: int) -> _Try:
    """Called by all processes, each with its own part and its device's memory."""
    held, published = held_bytes(shape, mode), published_bytes(shape, mode)
    # Copies of published weights are in the machine's memory, which is the device's own only on CPUs.
    peak = held + working_bytes(shape, mode) + (published if mode.is_on_cpus else 0)
    offloaded = offloaded_bytes(shape, mode) + published if mode.offloads else 0
    return _Try(
        mode=mode,
        held=_least_room(ranks, held, memory),
        peak=_least_room(ranks, peak, USABLE * memory),
        offloaded=_least_room(ranks, offloaded, USABLE * memory_share(ranks.num_ranks)),
    )


def _refusal(config: TrainingConfig, tries: Sequence[_Try], *, num_ranks: int) -> str:
    first, last = tries[0], tries[-1]
    needed, available = first.offloaded if first.mode.offloads else first.held
    of_machine = " of its machine's memory" if first.mode.offloads else ""
    text = (
        f"model.path: a process of {num_ranks} needs {needed / 1e9:.1f} GB{of_machine} to hold its part of "
        f"{config.model.path}, and {available / 1e9:.1f} GB are available to it; {_spread(first.mode)}"
    )
    if last.mode.offloads > first.mode.offloads:
        needed, available = last.offloaded
        text += (
            f", or its machine's memory: trainer.offload needs {needed / 1e9:.1f} GB of it, and {available / 1e9:.1f} "
            "GB are available"
        )
    return text + ("" if first.mode.has_adapter else ", or train an adapter (lora)")


def _spread(mode: TrainingMode) -> str:
    # On CPUs the processes of a machine share its memory: more of them on the same one have no more.
    return "spread trainer.processes over more machines" if mode.is_on_cpus else "raise trainer.processes"


def _report(chosen: _Try, tries: Sequence[_Try], config: TrainingConfig) -> None:
    _log.info(
        "memory of each process",
        gradient_checkpointing=chosen.mode.checkpoints_layers,
        offload=chosen.mode.offloads,
        is_chosen=config.trainer.gradient_checkpointing is None,
        GB_usable=round(chosen.peak[1] / 1e9, 2),
        tokens_per_pack=chosen.mode.pack_tokens,
        **{_way(each.mode): round(each.peak[0] / 1e9, 2) for each in tries},
    )
    needed, usable = chosen.peak
    if needed > usable:
        _log.warning(
            "memory may not suffice",
            GB_needed=round(needed / 1e9, 2),
            GB_usable=round(usable / 1e9, 2),
            fixes=f"{_spread(chosen.mode)}; lower trainer.tokens_per_pack; train an adapter (lora)",
        )


def _way(mode: TrainingMode) -> str:
    kept = "checkpointing" if mode.checkpoints_layers else "all_activations"
    return f"GB_with_{kept}{'_and_offload' if mode.offloads else ''}"


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
        model=config.model.folder,
    )
    index = ranks.stage_index
    return shape.stage(len(stages[index]), is_first=index == 0, is_last=index == len(stages) - 1)


def _shape(config: TrainingConfig) -> tuple[ModelShape | None, str]:
    try:
        return read_shape(config.model.folder), ""
    except (OSError, ValueError) as error:
        return None, str(error)


def _device_bytes(device: torch.device, ranks: Ranks) -> int:
    """Memory for this process: its GPU's, or its share of what its machine still has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_share(ranks.num_ranks)
