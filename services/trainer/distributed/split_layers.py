"""Splits each layer within itself over processes that compute the same tokens (tensor parallel).

Each of them has some of the heads, some of the columns of the feed-forward network, and whole experts. What attention
and feed-forward network receive is the same everywhere, and what they answer is added up; so are, backwards, the
gradients of what they received. A norm over all heads adds up the squares of each. Embedding, norms between layers and
output layer are the same in all.

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig, PreTrainedModel

from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.parameter_views import compute_with, local_part

DIMENSION = "tensor"
"""Of the mesh of a trainer's processes."""
FAMILIES = frozenset(("llama", "olmoe", "qwen2", "qwen3", "qwen3_moe"))
"""Model types whose modules have the names below, and which are tested."""
_LAYERS = "layers."
_REGIONS = ("self_attn", "mlp")
"""Of a layer: what comes in is whole, what goes out is added up."""
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_NORMS = ("q_norm", "k_norm")
_EXPERTS = "experts"


class SplitLayers:
    """The split of a run's models over one mesh, seen from one of its processes.

    Args:
        mesh: Of one dimension: the processes that share layers.
        num_shards: Processes over which what each of them has is sharded further.
    """

    def __init__(self, mesh: DeviceMesh, *, num_shards: int) -> None:
        self._mesh = mesh
        self._group = mesh.get_group()
        self._num_shards = num_shards
        self._size = mesh.size()
        self.partial: frozenset[str] = frozenset()
        """Parameters that all have, and whose gradients lack the share of the others; of every model that was split.

        Their names are those below the model that has the layers: layers.0...."""

    def split(self, model: PreTrainedModel) -> None:
        """Leave it this process' part of all layers, in place, before or after its weights are read.

        Raises:
            UnsupportedModelError: It is of another family, or cannot be divided so.
        """
        self._check(model)
        partial: set[str] = set()
        for number, layer in enumerate(model.model.layers):
            for name in _REGIONS:
                region = getattr(layer, name)
                for module in region.modules():
                    self._split_module(module)
                inside = region.named_parameters(prefix=f"{_LAYERS}{number}.{name}")
                partial.update(path for path, parameter in inside if not isinstance(parameter, DTensor))
                region.register_forward_pre_hook(self._enter, with_kwargs=True)
                region.register_forward_hook(self._leave)
        self.partial |= partial

    def split_adapter(self, model: PreTrainedModel) -> None:
        """Leave an adapter's factors this process' part: B is split like its layer's rows, A like its columns.

        Raises:
            UnsupportedModelError: They cannot be divided so.
        """
        for path, layer in model.named_modules():
            if hasattr(layer, "lora_A"):
                dim, factors = (0, layer.lora_B) if path.endswith(_BY_ROWS) else (1, layer.lora_A)
                for factor in factors.values():
                    # PEFT sees the layer's own part.
                    whole = [*factor.weight.shape]
                    whole[dim] = layer.base_layer.weight.shape[dim]
                    factor.weight = nn.Parameter(factor.weight.new_empty(whole))
                    self._split_parameters(factor, dim=dim)
        trained = ((path, each) for path, each in model.named_parameters() if each.requires_grad)
        self.partial |= {_below_layers(path) for path, each in trained if not isinstance(each, DTensor)}

    def has_split(self, tensor: Tensor) -> bool:
        """Whether each process has another part of a sharded tensor."""
        return isinstance(tensor, DTensor) and DIMENSION in (tensor.device_mesh.mesh_dim_names or ())

    def sum_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Complete the gradients of parameters that all processes have, by name, so that their copies stay equal.

        Where every process has the whole gradient it becomes their mean: libraries may add it up in unlike orders.
        """
        for name, gradient in gradients.items():
            if self.has_split(gradient):
                continue
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=self._group)
            if _below_layers(name) not in self.partial:
                local /= self._size

    def _check(self, model: PreTrainedModel) -> None:
        check_split(model.config, self._size)
        found = model.config.name_or_path or model.config.model_type
        for layer in model.model.layers:
            for path, module in layer.named_modules():
                if path.endswith(_BY_COLUMNS) and getattr(module, "bias", None) is not None:
                    raise UnsupportedModelError(
                        f"trainer.parallel.tensor: {path} of {found} has a bias, which is not supported; leave it 1"
                    )

    def _split_module(self, module: nn.Module) -> None:
        """Split the module's own parameters, if they are to be."""
        for name, child in module.named_children():
            if name in _BY_ROWS:
                self._split_parameters(child, dim=0)
            elif name in _BY_COLUMNS:
                self._split_parameters(child, dim=1)
            elif name in _NORMS and len(child.weight) > module.head_dim:
                # Not of each head, but of all heads together.
                self._split_parameters(child, dim=0)
                child.forward = functools.partial(self._normalised, child)
            elif name == _EXPERTS:
                self._split_parameters(child, dim=0)
                child.num_experts //= self._size
                # Without it, its functions do not leave out what is sent to no expert here.
                child._is_expert_parallel = True
                child.register_forward_pre_hook(self._keep_own_experts)

    def _split_parameters(self, module: nn.Module, *, dim: int) -> None:
        split_parameters(module, self._mesh, dim=dim, num_shards=self._num_shards, direction=DIMENSION)

    def _keep_own_experts(self, experts: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, index, weights = inputs
        own = index - self._mesh.get_local_rank() * experts.num_experts
        is_own = (own >= 0) & (own < experts.num_experts)
        # One beyond the last means none, in all of `transformers`' implementations.
        return hidden, own.where(is_own, experts.num_experts), weights.where(is_own, 0.0)

    def _normalised(self, norm: Any, hidden: Tensor) -> Tensor:
        """By the root mean square over the parts of all processes, as OLMoE's norm is."""
        own = hidden.float()
        # Each part of the result depends on all squares: their sum's gradient is the sum of all processes'.
        squares = _Entering.apply(_Leaving.apply(own.square().sum(-1, keepdim=True), self._group), self._group)
        mean = squares / (own.shape[-1] * self._size)
        scaled: Tensor = norm.weight * (own * torch.rsqrt(mean + norm.variance_epsilon)).to(hidden.dtype)
        return scaled

    def _enter(self, _region: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if inputs:
            return (_Entering.apply(inputs[0], self._group), *inputs[1:]), named
        return inputs, named | {"hidden_states": _Entering.apply(named["hidden_states"], self._group)}

    def _leave(self, _region: nn.Module, _inputs: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return _Leaving.apply(output[0], self._group), *output[1:]
        return _Leaving.apply(output, self._group)


def check_split(config: PretrainedConfig, size: int) -> None:
    """Check that `size` processes can split the layers of such a model. Raises UnsupportedModelError."""
    found = config.name_or_path or config.model_type
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"trainer.parallel.tensor: layers of {config.model_type} cannot be split, only those of "
            f"{', '.join(sorted(FAMILIES))}; leave it 1"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_experts"):
        number = getattr(config, name, None)
        if number is not None and number % size:
            raise UnsupportedModelError(
                f"trainer.parallel.tensor: {size} does not divide {name} {number} of {found}; change it"
            )


def split_parameters(module: nn.Module, mesh: DeviceMesh, *, dim: int, num_shards: int, direction: str) -> None:
    """Leave the module this process' equal part of its own parameters, in which it computes.

    Args:
        module: With parameters of its own.
        mesh: Of one dimension: the processes that divide them.
        dim: Of the parameters, along which they are divided.
        num_shards: Processes over which each part is sharded further.
        direction: Of `trainer.parallel`.

    Raises:
        UnsupportedModelError: A process would have nothing.
    """
    for name, parameter in module.named_parameters(recurse=False):
        own = parameter.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
        if len(own.chunk(num_shards)) < num_shards:
            raise UnsupportedModelError(
                f"trainer.parallel.{direction}: {list(parameter.shape)} numbers of {name} cannot be divided over "
                f"{direction} {mesh.size()} x shard {num_shards} processes; lower one of them"
            )
        split = DTensor.from_local(own, mesh, [Shard(dim)], run_check=False)
        setattr(module, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
    # FSDP has gathered them by then, over its own dimensions of the mesh.
    compute_with(module, local_part)


class _Entering(torch.autograd.Function):  # type: ignore[misc]  # torch declares no types for it
    """The same; backwards, the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Leaving(torch.autograd.Function):  # type: ignore[misc]
    """The sum of all processes' results; backwards the same."""

    @staticmethod
    def forward(_ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(part, group)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole


def _below_layers(name: str) -> str:
    """A parameter's name without that of the model around the layers, which differs for policy, critic and adapter."""
    _, found, rest = name.partition(_LAYERS)
    return found + rest
