"""Puts the training part of a plan document into the contract's form, and reads it again.

Everything that `trainer.processes` and `trainer.parallel` of a run need survives the way there and back.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.problem.plan_document import SHARE_DIGITS, Mesh, PlanDocument, TrainShare


def put_trainers(message: pb.Plan, plan: PlanDocument, shares: Sequence[float] = ()) -> None:
    """Add an assignment for each machine of the pool, which trains on its first GPUs.

    Args:
        message: A plan without assignments.
        plan: The document.
        shares: Work of each process of a machine, where the document states none.
    """
    stated = [each.share for each in plan.train]
    each_share = [share if share is not None else 0.0 for share in stated] if all(stated) else list(shares)
    total = sum(gpus * share for gpus, share in zip((each.gpus for each in plan.train), each_share, strict=False))
    mesh = plan.mesh or Mesh()
    for index, trains in enumerate(plan.train):
        message.assignments.add(
            node_id=trains.node,
            role=pb.ROLE_TRAINER,
            accelerator_indices=range(trains.gpus),
            num_replicas=1,
            share=trains.gpus * each_share[index] / total if total else 0.0,
            tensor_parallel=mesh.tensor if mesh.tensor > 1 else 0,
            pipeline_parallel=mesh.pipeline if mesh.pipeline > 1 else 0,
            layers_per_stage=mesh.layers_per_stage or (),
        )
    if plan.mesh is not None:
        message.trainer_islands.extend(mesh.sizes(plan.num_processes))


def trainers_of(message: pb.Plan) -> tuple[tuple[TrainShare, ...], Mesh | None]:
    """The pool and its mesh. Raises ValidationError if they are none."""
    found = [each for each in message.assignments if each.role == pb.ROLE_TRAINER]
    sizes = tuple(message.trainer_islands)
    if not found or not sizes:
        return tuple(TrainShare(node=each.node_id, gpus=len(each.accelerator_indices)) for each in found), None
    most = max(each.share / len(each.accelerator_indices) for each in found)
    pool = tuple(
        TrainShare(
            node=each.node_id,
            gpus=len(each.accelerator_indices),
            share=round(each.share / len(each.accelerator_indices) / most, SHARE_DIGITS) if most else None,
        )
        for each in found
    )
    first = found[0]
    mesh = Mesh(
        islands=sizes,
        tensor=first.tensor_parallel or 1,
        pipeline=first.pipeline_parallel or 1,
        layers_per_stage=tuple(first.layers_per_stage) or None,
    )
    return pool, mesh
