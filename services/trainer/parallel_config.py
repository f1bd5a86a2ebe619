"""Configures the directions in which the processes of a trainer divide its work."""

from __future__ import annotations

from math import prod
from typing import Annotated, Self

from pydantic import Field, model_validator

from penstock.config import StrictModel

Degree = Annotated[int, Field(ge=1, le=1024)]


class ParallelConfig(StrictModel):
    """The processes as a mesh: the product of all degrees is their number."""

    replicate: Degree = 1
    """Groups of processes that each hold a whole copy of weights and optimiser; gradients are summed over them."""
    shard: Degree | None = None
    """Processes of a group, over which weights, gradients and optimiser are sharded. Unset: all there are."""
    tensor: Degree = 1
    """Processes that split each layer between them by heads, columns and whole experts, for the same tokens."""
    pipeline: Degree = 1
    """Stages of layers into which each copy of the model is cut, which pass activations on; `shard` processes each."""
    layers_per_stage: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] | None = None
    """Layers of each stage, first to last: [1, 3]. Unset: as even as possible."""
    islands: Annotated[tuple[Degree, ...], Field(min_length=2)] | None = None
    """Processes of each island, [4, 2]: groups of unlike sizes that each shard a whole copy of weights and optimiser.
    Gradients are summed between islands once an optimiser step. Instead of all other directions."""
    expert: Degree = 1
    """Processes that divide the experts of each layer, and send each other the tokens for them; they divide `shard`."""
    context: Degree = 1
    """Not supported beyond 1: processes that divide a sample."""

    @model_validator(mode="after")
    def _has_known_directions(self) -> Self:
        if self.context > 1:
            raise ValueError(
                f"context: {self.context} is not supported, a sample is computed whole by one process; leave it 1, use "
                "shard or replicate"
            )
        if self.expert > 1 and self.tensor > 1:
            raise ValueError(
                f"expert: {self.expert} is not supported with tensor, which divides experts as well; leave it 1"
            )
        if self.expert > 1 and self.pipeline > 1:
            raise ValueError(
                f"expert: {self.expert} is not supported with pipeline, whose processes pass in unlike numbers of "
                "microbatches; leave it 1"
            )
        return self

    @model_validator(mode="after")
    def _has_sizes_of_all_stages(self) -> Self:
        sizes = self.layers_per_stage
        if sizes is not None and len(sizes) != self.pipeline:
            raise ValueError(
                f"layers_per_stage: {list(sizes)} states {len(sizes)} stages, and pipeline {self.pipeline}; "
                "give one number for each stage"
            )
        if self.pipeline > 1 and self.tensor > 1:
            raise ValueError(f"tensor: {self.tensor} is not supported with pipeline; leave it 1, use replicate")
        return self

    @model_validator(mode="after")
    def _has_islands_alone(self) -> Self:
        degrees = {
            "replicate": self.replicate,
            "shard": self.shard or 1,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "expert": self.expert,
        }
        beside = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        if self.islands is not None and beside:
            raise ValueError(
                f"islands: {list(self.islands)} each shard a copy of their own, {beside[0]} is not supported beside "
                "them; leave it out"
            )
        return self

    def mesh(self, num_processes: int) -> tuple[int, int]:
        """Copies of the model, and processes that share a stage of one, at most; ValueError if they do not fit."""
        if self.islands is not None:
            if (needed := sum(self.islands)) != num_processes:
                raise ValueError(
                    f"parallel: islands {list(self.islands)} need {needed} processes, and processes states "
                    f"{num_processes}; change one of them"
                )
            return len(self.islands), max(self.islands)
        degrees = {"replicate": self.replicate, "pipeline": self.pipeline, "tensor": self.tensor}
        shard = self.shard or max(1, num_processes // prod(degrees.values()))
        if (needed := prod(degrees.values()) * shard) != num_processes:
            split = "".join(f" x {name} {degrees[name]}" for name in ("pipeline", "tensor") if degrees[name] > 1)
            raise ValueError(
                f"parallel: replicate {self.replicate} x shard {shard}{split} needs {needed} processes, and "
                f"processes states {num_processes}; change one of them"
            )
        if shard % self.expert:
            raise ValueError(
                f"parallel: expert {self.expert} does not divide shard {shard}, the processes that hold one copy; "
                "change one of them"
            )
        return self.replicate, shard

    def together(self, num_processes: int) -> list[range]:
        """Ranks of the processes that have each pack together: a pipeline's stages, or those that split layers."""
        if self.pipeline == 1:
            return [range(first, first + self.tensor) for first in range(0, num_processes, self.tensor)]
        _, shard = self.mesh(num_processes)
        width = self.pipeline * shard
        starts = range(0, num_processes, width)
        return [range(start + column, start + width, shard) for start in starts for column in range(shard)]
