"""Checks whether GPUs have the memory to train as a plan says, by island and by stage, and whether a trainer could.

Part of the independent check (`plan_check`): rank by rank, from the problem and the trainer's own formula alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.model.decoder_shape import ModelShape
from penstock.model.training_memory import TrainingMode, working_bytes
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import NodeClass, Problem

_TOLERANCE = 1e-12
_OF_MACHINES = 0.9
"""Of a machine's memory, what its processes may take: the trainer's own rule."""


def mesh_violations(
    problem: Problem,
    machines: Mapping[str, NodeClass],
    plan: PlanDocument,
    state_GB: float,
    taken_GB: Mapping[str, float],
) -> list[str]:
    """What the processes lack, or could not be configured to do; empty if nothing.

    Args:
        problem: It states `train_pack_tokens`.
        machines: Each machine's entry.
        plan: With a pool, and perhaps a mesh.
        state_GB: Of one copy of everything that is trained and held.
        taken_GB: What others take of each GPU that trains, by machine; nothing of machines that are not listed.
    """
    offered_GB = [_usable_GB(problem, machines[share.node]) - taken_GB.get(share.node, 0.0) for share in plan.train]
    found = [*_structure(problem, plan), *_offload(problem, machines, plan, state_GB)]
    return found or _memory(problem, offered_GB, plan, state_GB)


def _structure(problem: Problem, plan: PlanDocument) -> Iterator[str]:
    shares = [share.share for share in plan.train for _ in range(share.gpus)]
    if None in shares and any(shares):
        yield "train: some machines state a share, and others do not"
    if (mesh := plan.mesh) is None:
        return
    sizes = mesh.islands or (len(shares),)
    if sum(sizes) != len(shares):
        yield f"mesh.islands: {sum(sizes)} processes, and train has {len(shares)} GPUs"
        return
    yield from _divided(problem, mesh, sizes[0])
    together = sizes[0] if mesh.pipeline > 1 else mesh.tensor
    if len(shares) % together:
        yield f"mesh: {len(shares)} processes are no multiple of the {together} that have packs together"
        return
    for first in range(0, len(shares), together):
        if len(set(shares[first : first + together])) > 1:
            yield f"train: processes {first} to {first + together - 1} have packs together, and unlike shares"


def _divided(problem: Problem, mesh: Mesh, size: int) -> Iterator[str]:
    """What of the model does not divide as an island of that size is to hold it."""
    model = problem.model
    if mesh.pipeline > 1:
        layers = mesh.layers_per_stage
        if mesh.pipeline > model.layers or (layers is not None and sum(layers) != model.layers):
            yield f"mesh: {mesh.pipeline} stages of {list(layers or ())} layers, and the model has {model.layers}"
        return
    widths = (model.q_heads, model.kv_heads, model.experts or model.ffn or mesh.tensor)
    if any(width % mesh.tensor for width in widths):
        yield f"mesh.tensor: {mesh.tensor} does not divide heads and feed-forward networks, {list(widths)}"
    if mesh.expert > 1 and (not model.experts or model.experts % mesh.expert or size % mesh.expert):
        yield f"mesh.expert: {mesh.expert} does not divide {model.experts or 0} experts and {size} processes"


def _offload(problem: Problem, machines: Mapping[str, NodeClass], plan: PlanDocument, state_GB: float) -> Iterator[str]:
    """What forbids that the state rests in the machines' memory, beside a copy of the weights in 16 bits."""
    if plan.mesh is None or not plan.mesh.offload:
        return
    size = (plan.mesh.islands or (plan.num_processes,))[0]
    if size == 1:
        yield "mesh.offload: a copy in one process, and only what is sharded can be offloaded"
    if sum(task.kind == "train" for task in problem.workload.train_tasks if not task.is_service) > 1:
        yield "mesh.offload: the trainer has a critic, which cannot be offloaded"
    for index, share in enumerate(plan.train):
        needed_GB = share.gpus * (state_GB + 2 * problem.model.params / 1e9) / size
        offered_GB = _OF_MACHINES * (machines[share.node].memory_GB or 0.0)
        if needed_GB > offered_GB * (1 + _TOLERANCE):
            yield (
                f"train.{index}.node: {share.node} rests {needed_GB:.1f} GB in its memory, of which {offered_GB:.1f} "
                "GB are known and may be taken (memory_GB)"
            )


def _memory(problem: Problem, offered_GB: Sequence[float], plan: PlanDocument, state_GB: float) -> list[str]:
    """Of the ways to train, with layers recomputed or not, which all processes share, the one that lacks least."""
    ways = [_lacking(problem, offered_GB, plan, state_GB, recomputes=recomputes) for recomputes in (True, False)]
    return min(ways, key=len)


def _lacking(
    problem: Problem, offered_GB: Sequence[float], plan: PlanDocument, state_GB: float, *, recomputes: bool
) -> list[str]:
    found = []
    for index, (share, each_GB) in enumerate(zip(plan.train, offered_GB, strict=True)):
        first = sum(before.gpus for before in plan.train[:index])
        needed_GB = max(
            _needed_GB(problem, plan, rank, state_GB, recomputes=recomputes)
            for rank in range(first, first + share.gpus)
        )
        if each_GB < needed_GB * (1 - _TOLERANCE):
            found.append(
                f"train.{index}.node: each of {plan.num_processes} GPUs needs up to {needed_GB:.2f} GB there, and "
                f"one of {share.node} offers {each_GB:.2f} GB"
            )
    return found


def _needed_GB(problem: Problem, plan: PlanDocument, rank: int, state_GB: float, *, recomputes: bool) -> float:
    """What the process of one rank needs."""
    model, mesh = problem.model, plan.mesh
    shape = problem_shape(problem)
    num_shards, is_stage = plan.num_processes, False
    if mesh is not None:
        sizes = list(mesh.islands or (plan.num_processes,))
        while rank >= sizes[0]:
            rank -= sizes.pop(0)
        num_shards = sizes[0] // (mesh.tensor * mesh.pipeline)
        if mesh.pipeline > 1:
            stage, is_stage = rank // num_shards, True
            each, more = divmod(model.layers, mesh.pipeline)
            layers = mesh.layers_per_stage or [each + (number < more) for number in range(mesh.pipeline)]
            shape = shape.stage(layers[stage], is_first=stage == 0, is_last=stage == mesh.pipeline - 1)
        else:
            shape = shape.split(mesh.tensor)
    mode = TrainingMode(
        num_shards=num_shards,
        pack_tokens=problem.cost_model.train_pack_tokens,
        is_half=True,
        checkpoints_layers=recomputes,
        is_stage=is_stage,
        num_expert_shards=1 if mesh is None else mesh.expert,
        offloads=mesh is not None and mesh.offload,
    )
    if mode.offloads:
        return working_bytes(shape, mode) / 1e9
    return state_GB * shape.num_params / model.params / num_shards + working_bytes(shape, mode) / 1e9


def problem_shape(problem: Problem) -> ModelShape:
    """The numbers of the problem's model that memory depends on."""
    model = problem.model
    return ModelShape(
        num_params=model.params,
        num_layers=model.layers,
        hidden=model.hidden,
        feed_forward=model.token_ffn or 0,
        query_width=model.q_heads * model.head_dim,
        key_width=model.kv_heads * model.head_dim,
        vocab=model.vocab,
        is_tied=model.tied_embeddings,
        num_chosen_experts=model.experts_per_token or 0,
        expert_params=model.expert_params,
        num_dense_layers=model.num_dense_layers,
        dense_feed_forward=model.ffn or model.token_ffn or 0,
    )


def _usable_GB(problem: Problem, node: NodeClass) -> float:
    constants = problem.cost_model
    return problem.gpu_types[node.gpu].hbm_GB * constants.mem_util - constants.reserve_GB
