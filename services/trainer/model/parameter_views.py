"""Lets a module compute with other tensors than its parameters: views of them, through which gradients reach them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def compute_with(module: nn.Module, view: Callable[[Tensor], Tensor]) -> None:
    """While the module computes, each of its own parameters is what `view` makes of it in that pass."""

    def show(_module: nn.Module, _inputs: object) -> None:
        # What is in `__dict__` is found before parameters are looked for.
        module.__dict__.update({name: view(parameter) for name, parameter in _own(module).items()})

    def hide(_module: nn.Module, _inputs: object, _output: object) -> None:
        for name in _own(module):
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(show)
    module.register_forward_hook(hide, always_call=True)


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def local_part(parameter: Tensor) -> Tensor:
    """What this process has of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
