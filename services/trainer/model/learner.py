"""AdamW over summed gradients, for the policy and for a critic alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from services.trainer.config import OptimizerConfig
from services.trainer.model.ranks import Ranks


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
            parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._max_grad_norm = settings.max_grad_norm
        self._ranks = ranks
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def gradient_norm(self) -> float:
        """L2 norm of the accumulated gradient, of all processes, which add it up; once for an optimiser step."""
        self._ranks.sum_gradients(self._gradients())
        counted = [
            parameter.grad
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and name not in self._ranks.copies
        ]
        return self._ranks.whole_norm(float(self._ranks.total(torch.nn.utils.get_total_norm(counted))))

    def step(self, *, divisor: int, norm: float, learning_rate: float) -> None:
        """Divides the gradient, clips it, takes the optimiser step and clears it.

        Args:
            divisor: At least 1.
            norm: Of the divided gradient.
            learning_rate: Of this step.
        """
        # One pass over the gradients: the division and the clipping together.
        clip = min(1.0, self._max_grad_norm / (norm + 1e-6))
        torch._foreach_mul_(self._gradients(), clip / divisor)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Zeroes the accumulated gradient."""
        torch._foreach_zero_(self._gradients())

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
