"""Defines the mesh of a training pool, in the trainer's own terms, with the rules of `trainer.parallel`."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from penstock.config import StrictModel

Count = Annotated[int, Field(ge=1, le=1024)]


class Mesh(StrictModel):
    """The directions in which the processes of the pool divide a step, in the order of their ranks."""

    islands: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=1024)] | None = None
    """Processes of each group that holds a copy of the model; unset: all are one. Unlike ones only shard."""
    tensor: Count = 1
    """Neighbours that split each layer between them."""
    pipeline: Count = 1
    """Stages of layers in each island, one after the other in its ranks, each sharded over equally many processes."""
    layers_per_stage: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Layers of each stage; unset: as even as possible."""
    expert: Count = 1
    """Neighbours that divide the experts of each layer between them; the rest is sharded over the whole island."""
    offload: bool = False
    """Weights, gradients and moments rest in the memory of the machines, and go to the GPUs layer by layer."""

    @model_validator(mode="after")
    def _can_be_carried_out(self) -> Self:
        if self.tensor > 1 and self.pipeline > 1:
            raise ValueError(f"tensor: {self.tensor} beside pipeline {self.pipeline}; the trainer has one of them")
        if self.expert > 1 and self.width > 1:
            raise ValueError(f"expert: {self.expert} beside tensor or pipeline; the trainer has one of them")
        if self.offload and (self.expert > 1 or self.width > 1):
            raise ValueError(
                "offload: true beside tensor, pipeline or expert; the trainer only shards what it offloads"
            )
        sizes = self.islands or ()
        if self.is_uniform and len(set(sizes)) > 1:
            raise ValueError(
                f"islands: {list(sizes)} are unlike beside tensor, pipeline, expert or offload; make them equal"
            )
        if any(size % (self.width * self.expert) for size in sizes):
            raise ValueError(
                f"islands: {list(sizes)} are no multiples of tensor x pipeline x expert, {self.width * self.expert}"
            )
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.pipeline:
            layers = list(self.layers_per_stage)
            raise ValueError(f"layers_per_stage: {layers} for pipeline {self.pipeline}; state one number a stage")
        return self

    @property
    def width(self) -> int:
        """Processes that have a pack together."""
        return self.tensor * self.pipeline

    @property
    def is_uniform(self) -> bool:
        """Whether islands are alike, `replicate` in the trainer: they sum gradients after every backward pass."""
        return self.width > 1 or self.expert > 1 or self.offload

    def sizes(self, num_processes: int) -> tuple[int, ...]:
        """Processes of each island, among that many."""
        return self.islands or (num_processes,)

    def error(self, num_processes: int) -> str | None:
        """Why that many processes are no such mesh; None if they are."""
        sizes = self.sizes(num_processes)
        if sum(sizes) != num_processes:
            return f"mesh.islands: {list(sizes)} are {sum(sizes)} processes, and train has {num_processes} GPUs"
        if sizes[0] % self.width:
            return f"mesh: {sizes[0]} processes are no multiple of tensor {self.tensor} x pipeline {self.pipeline}"
        if sizes[0] % self.expert:
            return f"mesh.expert: {self.expert} does not divide the {sizes[0]} processes that hold a copy"
        return None

    def parallel(self, num_processes: int) -> dict[str, Any]:
        """`trainer.parallel` of a run."""
        sizes = self.sizes(num_processes)
        if not self.is_uniform:
            return {"islands": list(sizes)} if len(sizes) > 1 else {}
        found: dict[str, Any] = {"replicate": len(sizes), "shard": sizes[0] // self.width}
        found |= {name: degree for name in ("tensor", "pipeline", "expert") if (degree := getattr(self, name)) > 1}
        if self.layers_per_stage is not None:
            found["layers_per_stage"] = list(self.layers_per_stage)
        return found
