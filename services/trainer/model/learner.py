"""AdamW over summed gradients, for the policy and for a critic alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.trainer.model.ranks import Ranks
from services.trainer.run_sections import OptimizerConfig


class Learner:
    """Parameters, their accumulated gradients, and the optimiser that changes them.

    Args:
        parameters: By name; sharded already.
        settings: Of the optimiser.
        ranks: The processes over which they are sharded.
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: OptimizerConfig, *, ranks: Ranks) -> None:
        self.parameters = parameters
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters_of_mesh} for parameters_of_mesh in _by_mesh(parameters.values())],
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._max_grad_norm = settings.max_grad_norm
        self._ranks = ranks
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def configure(self, settings: OptimizerConfig) -> None:
        """Later steps use these settings; a step's learning rate comes with it."""
        for group in self.optimizer.param_groups:
            group["betas"], group["weight_decay"] = settings.betas, settings.weight_decay
        self._max_grad_norm = settings.max_grad_norm

    def gradient_norm(self) -> float:
        """L2 norm of the accumulated gradient, of all processes, which add it up; once for an optimiser step."""
        gradients = {name: each.grad for name, each in self.parameters.items() if each.grad is not None}
        self._ranks.sum_gradients(gradients)
        counted = [gradient for name, gradient in gradients.items() if name not in self._ranks.copies]
        norms = [float(self._ranks.total(torch.nn.utils.get_total_norm(each))) for each in _by_mesh(counted)]
        return self._ranks.whole_norm(math.hypot(*norms))

    def step(self, *, divisor: int, norm: float, learning_rate: float) -> None:
        """Divides the gradient, clips it, takes the optimiser step and clears it.

        Args:
            divisor: At least 1.
            norm: Of the divided gradient.
            learning_rate: Of this step.
        """
        # One pass over the gradients: the division and the clipping together.
        clip = min(1.0, self._max_grad_norm / (norm + 1e-6))
        for gradients in self._gradients():
            torch._foreach_mul_(gradients, clip / divisor)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Zeroes the accumulated gradient."""
        for gradients in self._gradients():
            torch._foreach_zero_(gradients)

    def _gradients(self) -> list[list[Tensor]]:
        return _by_mesh(each.grad for each in self.parameters.values() if each.grad is not None)


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists of tensors that are sharded over the same processes: PyTorch takes no others together."""
    lists: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return [*lists.values()]
