"""Cuts a training pool into the islands of a mesh, and these into stages: which GPUs stand where, rank by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_document import TrainShare
from services.scheduler.problem.problem import NodeClass


@dataclass(frozen=True, slots=True)
class Part:
    """Processes of one machine that follow each other in rank."""

    machine: str
    node: NodeClass
    """The machine's entry."""
    gpus: int
    share: float
    """Of tokens, of each of its processes."""


Island = tuple[tuple[Part, ...], ...]
"""Its stages, first to last; one where layers are not cut."""


def islands_of(pool: Sequence[TrainShare], mesh: Mesh, nodes: Mapping[str, NodeClass]) -> list[Island]:
    """The islands of a pool, which is that mesh; without shares all processes have as many tokens."""
    parts = [Part(each.node, nodes[each.node], each.gpus, each.share or 1.0) for each in pool]
    found = []
    for island in cut(parts, mesh.sizes(sum(each.gpus for each in pool))):
        size = sum(part.gpus for part in island) // mesh.pipeline
        found.append(tuple(cut(island, (size,) * mesh.pipeline)))
    return found


def cut(parts: Sequence[Part], sizes: Sequence[int]) -> Iterator[tuple[Part, ...]]:
    """Runs of that many processes each, together all of them."""
    rest = list(reversed(parts))
    for size in sizes:
        taken, needed = list[Part](), size
        while needed:
            part = rest.pop()
            here = min(needed, part.gpus)
            taken.append(Part(part.machine, part.node, here, part.share))
            if here < part.gpus:
                rest.append(Part(part.machine, part.node, part.gpus - here, part.share))
            needed -= here
        yield tuple(taken)


def size_of(parts: Sequence[Part]) -> int:
    """Processes of a run."""
    return sum(part.gpus for part in parts)
