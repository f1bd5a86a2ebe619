"""Puts a plan document into the contract's form, all but its generators, and reads plans again.

Everything that `trainer.processes` and `trainer.parallel` of a run need survives the way there and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.tracing.recording import Value
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_document import (
    SHARE_DIGITS,
    Broker,
    CriticPlace,
    GpuWorkers,
    PlanDocument,
    Relay,
    Replicas,
    TrainShare,
)

CENTER = (pb.ROLE_BROKER, pb.ROLE_SCHEDULER)
"""What a run has one of, and revisions leave where it is."""


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
            expert_parallel=mesh.expert if mesh.expert > 1 else 0,
            offloads=mesh.offload,
        )
    if plan.mesh is not None:
        message.trainer_islands.extend(mesh.sizes(plan.num_processes))


def put_services(message: pb.Plan, plan: PlanDocument, first: Mapping[str, int]) -> None:
    """Add everything that is not trained or generated.

    `first` is how many of each machine's GPUs train or generate; services have the next ones, unless they share some.
    """
    taken = Counter(first)
    if (critic := plan.critic) is not None:
        begin = 0 if critic.is_beside_trainer else taken[critic.node]
        indices = range(begin, begin + critic.gpus)
        message.assignments.add(
            node_id=critic.node, role=pb.ROLE_CRITIC, accelerator_indices=indices, num_replicas=critic.gpus
        )
        taken[critic.node] += 0 if critic.is_beside_trainer else critic.gpus
    kinds = ((pb.ROLE_SCORER, plan.score), (pb.ROLE_REWARD, plan.reward_gpus))
    for role, each in ((role, each) for role, placed in kinds for each in placed):
        begin = taken[each.node]
        taken[each.node] += each.gpus
        indices = range(begin, begin + each.gpus)
        message.assignments.add(node_id=each.node, role=role, accelerator_indices=indices, num_replicas=each.gpus)
    for name in plan.reward:
        message.assignments.add(node_id=name, role=pb.ROLE_REWARD, num_replicas=1)
    for relay in plan.relay:
        message.weight_relays.add(site=relay.site, node_id=relay.node)
    if plan.broker is not None:
        broker = plan.broker
        message.assignments.add(node_id=broker.node, role=pb.ROLE_BROKER, num_replicas=broker.count)
    if plan.scheduler is not None:
        message.assignments.add(node_id=plan.scheduler, role=pb.ROLE_SCHEDULER, num_replicas=1)


def document_of(plan: pb.Plan) -> PlanDocument:
    """Everything that a plan on the wire places. Raises ValidationError if it is none."""
    gen = [
        Replicas(
            node=each.node_id,
            tp=each.tensor_parallel or 1,
            pp=each.pipeline_parallel or 1,
            count=each.num_replicas or 1,
            batch=each.num_concurrent_samples or None,
        )
        for each in plan.assignments
        if each.role == pb.ROLE_GENERATOR
    ]
    score, reward_gpus = (
        tuple(
            GpuWorkers(node=each.node_id, gpus=len(each.accelerator_indices) or 1)
            for each in plan.assignments
            if each.role == role and (each.accelerator_indices or role == pb.ROLE_SCORER)
        )
        for role in (pb.ROLE_SCORER, pb.ROLE_REWARD)
    )
    rewards = (each for each in plan.assignments if each.role == pb.ROLE_REWARD)
    reward = [each.node_id for each in rewards if not each.accelerator_indices]
    train, mesh = trainers_of(plan)
    center = {each.role: each for each in plan.assignments if each.role in CENTER}
    broker, scheduler = (center.get(role) for role in CENTER)
    return PlanDocument(
        gen=tuple(gen),
        train=train,
        mesh=mesh,
        score=score,
        reward=tuple(reward),
        broker=None if broker is None else Broker(node=broker.node_id, count=broker.num_replicas or 1),
        scheduler=None if scheduler is None else scheduler.node_id,
        critic=_critic_of(plan),
        relay=tuple(Relay(site=each.site, node=each.node_id) for each in plan.weight_relays),
        reward_gpus=reward_gpus,
    )


def keep_center(plan: pb.Plan, before: pb.Plan) -> None:
    """Give a plan the broker and the scheduler of the one before: revisions do not move them."""
    others = [each for each in plan.assignments if each.role not in CENTER]
    kept = [each for each in before.assignments if each.role in CENTER]
    del plan.assignments[:]
    plan.assignments.extend([*others, *kept])


def _critic_of(message: pb.Plan) -> CriticPlace | None:
    """Its place; beside the trainer if they have accelerators in common."""
    found = next((each for each in message.assignments if each.role == pb.ROLE_CRITIC), None)
    if found is None:
        return None
    trained = {
        index
        for each in message.assignments
        if (each.role, each.node_id) == (pb.ROLE_TRAINER, found.node_id)
        for index in each.accelerator_indices
    }
    indices = found.accelerator_indices
    return CriticPlace(node=found.node_id, gpus=len(indices) or 1, is_beside_trainer=not trained.isdisjoint(indices))


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
        expert=first.expert_parallel or 1,
        offload=first.offloads,
    )
    return pool, mesh


def described(plan: pb.Plan) -> dict[str, Value]:
    """What a span says of the plan that it ended with."""
    return {
        "rl.plan.solver": plan.solver,
        "rl.plan.tokens_per_second": plan.expected_tokens_per_second,
        "rl.plan.explanation": plan.explanation,
    }
