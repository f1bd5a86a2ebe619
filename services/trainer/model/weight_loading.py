"""Loads a Hugging Face directory: alone, or into a model that is sharded before its weights are read.

Each process then reads only its part of every tensor. `transformers` does the reading, with its conversions of names
and experts; what is added here is the step between the empty model and its weights, and that a checkpoint which does
not fit the model is refused, in all processes alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.distributed import DistributedConfig

from penstock.model.weight_index import check_weights
from services.trainer.model.attention import PACKED_ATTENTION
from services.trainer.model.backend import BackendError, UnsupportedModelError
from services.trainer.model.parameter_views import compute_with
from services.trainer.model.precision import MASTER
from services.trainer.model.ranks import Ranks

_STACK = 3
"""Dimensions of the weights of all experts of a layer."""
_log = structlog.get_logger()
Modules = Callable[[PreTrainedModel], Iterable[nn.Module]]


def whole_model(model: PreTrainedModel) -> Iterable[nn.Module]:
    """The model alone, as it is."""
    return (model,)


def load_weights(
    path: Path,
    *,
    dtype: torch.dtype,
    computing: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    sharded: Modules = whole_model,
    layers_per_stage: Sequence[int] | None = None,
    has_output: bool = True,
) -> PreTrainedModel:
    """The model on its device, in evaluation mode, sharded over the processes, all of which call this.

    Args:
        path: Hugging Face directory: configuration, safetensors.
        dtype: Element type in which the weights are held.
        computing: Element type of matrix products.
        device: Of this process.
        ranks: The processes.
        sharded: Its modules that will be called, each of which is sharded with all it contains. A generator may change
            the model before and after; one process, too, reads weights into what it leaves then.
        layers_per_stage: Of the stages into which the processes cut it; None for even ones.
        has_output: False if its output layer is not used.

    Raises:
        UnsupportedModelError: The checkpoint does not fit its own configuration, or the model's attention cannot be
            replaced; or so it was in another process.
        OSError: The directory does not hold a model.
    """
    problem: BackendError | OSError | None = None
    try:
        cut = partial(ranks.cut, layers_per_stage=layers_per_stage, has_output=has_output)
        model = _loaded(path, dtype=dtype, computing=computing, ranks=ranks, sharded=sharded, cut=cut)
    except (BackendError, OSError) as error:
        problem = error
    if not ranks.agree(problem is None):
        raise problem or UnsupportedModelError(f"{path}: another process could not load the model")
    if computing != MASTER:
        # Whatever layers multiply in, and whatever their weights are held or gathered in, they add up in float32.
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.to(MASTER))
        if ranks.num_ranks == 1:
            _multiply_experts_in(computing, model)
    # Of a sharded model only buffers move; the call also lets FSDP take over the parameters that were read.
    return _with_buffers_on(device, model.eval().cpu()) if ranks.offloads else model.eval().to(device)


def _with_buffers_on(device: torch.device, model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose parameters stay where they are."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model


def _multiply_experts_in(computing: torch.dtype, model: PreTrainedModel) -> None:
    """As autocast does for all other products, and FSDP by what it gathers: stacks of experts multiply in their own."""
    for module in model.modules():
        is_stack = any(parameter.dim() == _STACK for parameter in module.parameters(recurse=False))
        # Autocast knows convolutions, whose weights have as many dimensions.
        if is_stack and not isinstance(module, nn.Conv1d):
            compute_with(module, lambda parameter: parameter.to(computing))


def _loaded(
    path: Path,
    *,
    dtype: torch.dtype,
    computing: torch.dtype,
    ranks: Ranks,
    sharded: Modules,
    cut: Callable[[PreTrainedModel], None],
) -> PreTrainedModel:
    def shard(model: PreTrainedModel) -> None:
        cut(model)
        for module in sharded(model):
            ranks.shard(module, computing=computing)

    # Safetensors alone: files of PyTorch's own format are pickles.
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    options |= {"attn_implementation": PACKED_ATTENTION, "dtype": dtype}
    try:
        check_weights(path)
        empty = _empty_model(path) if ranks.num_ranks > 1 or sharded is not whole_model else None
        if empty is not None and _can_read_parts(empty, ranks.num_shards * ranks.num_splits):
            options |= {"config": empty.config, "distributed_config": DistributedConfig()}
            model = _checked(_sharding_first(type(empty), shard), path, options)
            _leave_files(model)
            return model
        model = _checked(AutoModelForCausalLM, path, options)
    except ValueError as error:
        text = str(error)
        raise UnsupportedModelError(text if text.startswith(f"{path}") else f"{path}: {text}") from error
    except KeyError as error:
        # From a table of attention functions in the model's own code.
        raise UnsupportedModelError(f"{path}: its attention cannot be replaced by {error}") from error
    shard(model)
    return model


def _leave_files(model: PreTrainedModel) -> None:
    """Copy parts that were read in the type of the files: they are views of whole tensors, mapped into memory."""
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if local is not None and local.untyped_storage().nbytes() > local.nbytes:
                # Tied weights stay one.
                if id(parameter) not in copies:
                    copy = parameter.detach().clone()
                    copies[id(parameter)] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
                setattr(module, name, copies[id(parameter)])


def _empty_model(path: Path) -> PreTrainedModel:
    """The model without memory for its weights."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _can_read_parts(empty: PreTrainedModel, num_parts: int) -> bool:
    """Whether every part can be read alone: as it is in the files, or as a stack of whole experts.

    Other conversions need whole tensors, and the loader fails in a process that has no expert of a layer.
    """
    for conversion in get_model_conversion_mapping(empty):
        if not isinstance(conversion, WeightConverter):
            continue
        first, *others = conversion.operations
        is_stack = isinstance(first, MergeModulelist) and first.dim == 0
        if not is_stack or not all(isinstance(other, Concatenate) and other.dim > 0 for other in others):
            return False
        for name, parameter in empty.named_parameters():
            is_stacked = any(target in name for target in conversion.target_patterns)
            if is_stacked and len(parameter.chunk(num_parts)) < num_parts:
                return False
    return True


def _sharding_first(model_class: Any, shard: Callable[[PreTrainedModel], None]) -> Any:
    """The class with another step between the empty model and its weights, at the place where `transformers` shards.

    It has the same name, by which `transformers` looks up conversions.
    """

    def maybe_distribute_model(_class: Any, model: PreTrainedModel, *_: object) -> PreTrainedModel:
        # Otherwise done last: FSDP would hold tied weights as two, and gather both.
        model.tie_weights()
        shard(model)
        return model

    def is_custom_code(_class: Any) -> bool:
        # Of custom code, as which the classes that FSDP makes would count, some buffers are not initialised.
        return bool(model_class.is_custom_code())

    def initialize_weights(model: PreTrainedModel) -> None:
        # Buffers only. Weights that were not read are refused; to draw them, processes would wait for each other.
        for parameter in model.parameters():
            parameter._is_hf_initialized = True
        model_class.initialize_weights(model)

    members = {
        "maybe_distribute_model": classmethod(maybe_distribute_model),
        "is_custom_code": classmethod(is_custom_code),
        "initialize_weights": initialize_weights,
    }
    return type(model_class.__name__, (model_class,), members)


def _checked(model_class: Any, path: Path, options: dict[str, Any]) -> PreTrainedModel:
    """The model, if its files hold the tensors that its configuration asks for; others are left out, with a warning."""
    try:
        # Other shapes are not ignored, but reported with their names.
        model, report = model_class.from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except SafetensorError as error:
        raise UnsupportedModelError(f"{path}: its weights cannot be read: {error}") from error
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    untied = sorted(tied.keys() - model.all_tied_weights_keys.keys())
    problems += [f"{name} differs from {tied[name]}, to which it is tied" for name in untied]
    mismatched = sorted(name for name, *_ in report["mismatched_keys"])
    problems += [f"{name} is not {list(model.get_parameter_or_buffer(name).shape)}" for name in mismatched]
    if unknown := sorted(report["unexpected_keys"]):
        # As published models have them: heads for other tasks, layers that predict several tokens.
        _log.warning("tensors of no use to the model", path=str(path), num_tensors=len(unknown), first=unknown[0])
    if problems:
        more = f", and {len(problems) - 1} more such tensors" if len(problems) > 1 else ""
        raise UnsupportedModelError(f"{path}: its weights do not fit its config.json: {problems[0]}{more}")
    return model
