"""Configures the directions in which the processes of a trainer divide its work."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from penstock.config import StrictModel

Degree = Annotated[int, Field(ge=1, le=1024)]
_MISSING = {
    "tensor": "layers are not split within themselves",
    "pipeline": "layers are not divided over stages",
    "expert": "experts are sharded like all other weights, not sent to",
    "context": "a sample is computed whole by one process",
}
"""What a direction that the trainer does not have would do."""


class ParallelConfig(StrictModel):
    """The processes as a mesh: the product of all degrees is their number."""

    replicate: Degree = 1
    """Groups of processes that each hold a whole copy of weights and optimiser; gradients are summed over them."""
    shard: Degree | None = None
    """Processes of a group, over which weights, gradients and optimiser are sharded. Unset: all there are."""
    tensor: Degree = 1
    """Not supported beyond 1: processes that split each layer."""
    pipeline: Degree = 1
    """Not supported beyond 1: stages of layers."""
    expert: Degree = 1
    """Not supported beyond 1: processes that divide the experts of a layer."""
    context: Degree = 1
    """Not supported beyond 1: processes that divide a sample."""

    @model_validator(mode="after")
    def _has_known_directions(self) -> Self:
        for name, why in _MISSING.items():
            if (degree := getattr(self, name)) > 1:
                raise ValueError(f"{name}: {degree} is not supported, {why}; leave it 1, use shard or replicate")
        return self

    def mesh(self, num_processes: int) -> tuple[int, int]:
        """Groups, and processes in each; raises ValueError if that is another number of processes."""
        shard = self.shard or max(1, num_processes // self.replicate)
        if self.replicate * shard != num_processes:
            raise ValueError(
                f"parallel: replicate {self.replicate} x shard {shard} needs {self.replicate * shard} processes, and "
                f"processes states {num_processes}; change one of them"
            )
        return self.replicate, shard
