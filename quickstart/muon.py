"""Muon in float32, for CPUs.

PyTorch's own orthogonalises in bfloat16, which a CPU without instructions for it computes five times slower than
float32: that was more than half of the warm start. Everything else is as in `torch.optim.Muon`.

Source: Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

# Axes: R rows, C columns of a weight matrix.
_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_NUM_ITERATIONS = 5
_EPSILON = 1e-7


class Float32Muon(Optimizer):  # type: ignore[misc]  # torch has no types here.
    """Muon with Nesterov momentum and decoupled weight decay.

    Args:
        matrices: Weight matrices [R, C], float32.
        lr: Learning rate; a matrix with more rows than columns takes sqrt(R / C) times that.
        momentum: Of the exponential average of gradients.
        weight_decay: Share of a weight, times `lr`, that each step takes off.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(list(matrices), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def step(self) -> None:
        """Apply one update to every matrix that has a gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                settings = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
                for weight_RC in group["params"]:
                    if weight_RC.grad is not None:
                        self._update(weight_RC, weight_RC.grad, **settings)

    def _update(
        self, weight_RC: torch.Tensor, grad_RC: torch.Tensor, *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        average_RC = self.state[weight_RC].setdefault("momentum_buffer", torch.zeros_like(grad_RC))
        average_RC.lerp_(grad_RC, 1 - momentum)
        num_rows, num_columns = weight_RC.shape
        update_RC = _orthogonalize(grad_RC.lerp(average_RC, momentum))
        weight_RC.mul_(1 - lr * weight_decay)
        weight_RC.add_(update_RC, alpha=-lr * max(1.0, num_rows / num_columns) ** 0.5)


def _orthogonalize(matrix_RC: torch.Tensor) -> torch.Tensor:
    """Return the nearest matrix whose singular values are all about one, by the quintic Newton-Schulz iteration."""
    if matrix_RC.size(0) > matrix_RC.size(1):
        return _orthogonalize(matrix_RC.T).T
    a, b, c = _COEFFICIENTS
    result_RC = matrix_RC / matrix_RC.norm().clamp(min=_EPSILON)
    for _ in range(_NUM_ITERATIONS):
        gram_RR = result_RC @ result_RC.T
        result_RC = torch.addmm(result_RC, torch.addmm(gram_RR, gram_RR, gram_RR, beta=b, alpha=c), result_RC, beta=a)
    return result_RC
