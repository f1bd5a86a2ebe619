"""Defines the plan document: which machines generate, with which parallelism, and which train.

    {"gen":   [{"node": "h20-0", "tp": 1, "count": 8}],
     "train": [{"node": "h800-0", "gpus": 8}]}

`count` replicas of tensor-parallel degree `tp` on a machine; `gpus` of a machine in the training pool.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import Field

from penstock.config import StrictModel, read_document, validate
from services.scheduler.problem.problem import MAX_NODES, NodeClass, Problem

Count = Annotated[int, Field(ge=1, le=1024)]


class Replicas(StrictModel):
    """Equal generation replicas on one machine."""

    node: str
    tp: Count = 1
    """GPUs of each replica."""
    count: Count = 1


class TrainShare(StrictModel):
    """The part of one machine that is in the training pool."""

    node: str
    gpus: Count


class PlanDocument(StrictModel):
    """Roles of all machines; the cost model judges nothing else."""

    gen: tuple[Replicas, ...] = Field(default=(), max_length=8 * MAX_NODES)
    train: tuple[TrainShare, ...] = Field(default=(), max_length=MAX_NODES)


def read_plan(path: Path) -> PlanDocument:
    """A plan from a file: a bare plan, or the output of `penstock plan --json`. Raises ConfigError."""
    found = read_document(path)
    return validate(PlanDocument, found["rm1_plan"] or {} if "rm1_plan" in found else found, source=str(path))


def node_classes(problem: Problem) -> dict[str, NodeClass]:
    """Each machine's entry in the problem, by the machine's id; in the problem's order."""
    return {node.machine(index): node for node in problem.nodes for index in range(node.count)}


def placement_error(plan: PlanDocument, nodes: dict[str, NodeClass]) -> str | None:
    """Why the machines cannot fit the plan, naming the field; None if they can.

    The cost model checks whether the model fits into memory.
    """
    used: Counter[str] = Counter()
    trainers: set[str] = set()
    for index, replicas in enumerate(plan.gen):
        if replicas.node not in nodes:
            return f"gen.{index}.node: there is no machine {replicas.node!r}"
        used[replicas.node] += replicas.tp * replicas.count
    for index, share in enumerate(plan.train):
        if share.node not in nodes:
            return f"train.{index}.node: there is no machine {share.node!r}"
        if share.node in trainers:
            return f"train.{index}.node: {share.node!r} is listed twice; add its gpus up"
        trainers.add(share.node)
        used[share.node] += share.gpus
    for node, gpus in used.items():
        if gpus > nodes[node].gpus:
            return f"machine {node} has {nodes[node].gpus} GPUs, and the plan uses {gpus}"
    return None
