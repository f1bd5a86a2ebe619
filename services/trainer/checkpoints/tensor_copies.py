"""Writes tensors while the next step changes them, if there is memory for copies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

from torch import Tensor
from torch.distributed.tensor import DTensor


def write_copies(
    thread: Executor, write: Callable[[dict[str, Tensor]], None], tensors: dict[str, Tensor], *, max_copied_bytes: float
) -> Future[None]:
    """Has `thread` write copies of tensors; without copies, before it returns, if they exceed `max_copied_bytes`."""
    num_bytes = sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors.values())
    if num_bytes <= max_copied_bytes:
        return thread.submit(write, _copied(tensors))
    written = thread.submit(write, tensors)
    wait([written])
    return written


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory: the next step changes the originals in place."""
    return {
        name: tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
        for name, tensor in tensors.items()
    }
