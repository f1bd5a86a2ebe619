"""Judges training pools, with or without a mesh, and gives each pool its best one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.scheduler.cost_model.demand import Demand
from services.scheduler.cost_model.network import Network
from services.scheduler.cost_model.pool_memory import PoolMemory
from services.scheduler.cost_model.training_step import TrainingStep, training_step
from services.scheduler.meshes.islands import Island, Part, cut, islands_of, size_of
from services.scheduler.meshes.mesh_memory import MeshMemory
from services.scheduler.meshes.mesh_search import MeshSearch, Trained, pool_of
from services.scheduler.meshes.mesh_step import MeshSteps
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_document import PlanDocument, TrainShare
from services.scheduler.problem.problem import NodeClass, Problem

Nodes = Mapping[str, NodeClass]
"""Each machine's entry."""


class TrainingPools:
    """The training pools of one problem; those with the same numbers of GPUs are searched once.

    Args:
        problem: The problem; its meshes are known if it states `train_pack_tokens`.
        demand: Its demand.
        network: Its links.
        memory: The rule for pools without a mesh.
        usable_bytes: Usable memory of a GPU, by node entry.
    """

    def __init__(
        self,
        problem: Problem,
        demand: Demand,
        network: Network,
        memory: PoolMemory,
        usable_bytes: Mapping[str, float],
    ) -> None:
        self._problem, self._demand, self._network, self._pool_memory = problem, demand, network, memory
        self.search: MeshSearch | None = None
        if memory.is_even:
            self.memory = MeshMemory(problem, demand, usable_bytes)
            self.steps = MeshSteps(problem, demand, network)
            self.search = MeshSearch(problem, self.memory, self.steps)
        self._usable_bytes = usable_bytes
        self._found: dict[tuple[tuple[str, int], ...], Trained | None] = {}

    def error(self, plan: PlanDocument, nodes: Nodes) -> str | None:
        """Why the pool of a plan cannot train; None if it can."""
        if plan.mesh is None:
            return self._pool_memory.error([(nodes[share.node], share.gpus) for share in plan.train])
        if self.search is None:
            return "mesh: memory of islands and stages is only known with cost_model.train_pack_tokens; state that"
        if (error := _model_error(self._problem, plan.mesh)) is not None:
            return error
        if plan.mesh.offload and (obstacle := self._problem.offload_obstacle) is not None:
            return f"mesh.offload: {obstacle}"
        islands = islands_of(plan.train, plan.mesh, nodes)
        return _shares_error(islands, plan.mesh) or self.memory.error(islands, plan.mesh)

    def error_beside(self, plan: PlanDocument, nodes: Nodes, *, machine: str, taken_bytes: float) -> str | None:
        """The same where something else takes that much memory of each GPU that trains on one machine."""
        node = nodes[machine].model_copy(update={"name": f"{machine} with a critic"})
        problem = self._problem.model_copy(update={"nodes": (*self._problem.nodes, node)})
        left = {**self._usable_bytes, node.name: self._usable_bytes[nodes[machine].name] - taken_bytes}
        memory = PoolMemory(problem, self._demand, left)
        pools = TrainingPools(problem, self._demand, self._network, memory, left)
        return pools.error(plan, {**nodes, machine: node})

    def step(self, plan: PlanDocument, nodes: Nodes) -> TrainingStep:
        """A step of the pool of a plan, which can train."""
        if plan.mesh is not None:
            return self.steps.step(islands_of(plan.train, plan.mesh, nodes), plan.mesh)
        pool = [(nodes[share.node], share.gpus) for share in plan.train]
        return training_step(self._problem, self._demand, self._network, pool)

    def arranged(self, pool: Sequence[TrainShare], nodes: Nodes) -> tuple[tuple[TrainShare, ...], Mesh | None]:
        """These machines' GPUs in their best mesh; as they are where meshes are unknown, or none has the memory."""
        if self.search is None or not pool:
            return tuple(pool), None
        # Machines of an entry are alike: named by their place among them, they are found again.
        ordered = sorted(pool, key=lambda share: (nodes[share.node].name, -share.gpus, share.node))
        key = tuple((nodes[share.node].name, share.gpus) for share in ordered)
        if key not in self._found:
            parts = [Part(str(index), nodes[share.node], share.gpus, 1.0) for index, share in enumerate(ordered)]
            self._found[key] = self.search.best(parts, self._one_copy(parts))
        if (found := self._found[key]) is None:
            return tuple(pool), None
        real = [share.node for share in ordered]
        return tuple(each.model_copy(update={"node": real[int(each.node)]}) for each in found.pool), found.mesh

    def headed(
        self, pool: Sequence[TrainShare], mesh: Mesh | None, nodes: Nodes, *, region: str
    ) -> tuple[tuple[TrainShare, ...], Mesh | None]:
        """The same with its head in a region, if islands or machines of the pool are there; stages stay in order."""
        if mesh is not None and mesh.is_uniform:
            return tuple(pool), mesh

        def is_away(machine: TrainShare) -> bool:
            return nodes[machine.node].region != region

        if mesh is None:
            return tuple(sorted(pool, key=is_away)), None
        islands = sorted(islands_of(pool, mesh, nodes), key=lambda island: island[0][0].node.region != region)
        sizes = tuple(sum(map(size_of, island)) for island in islands)
        return pool_of(islands), mesh.model_copy(update={"islands": sizes})

    def _one_copy(self, parts: Sequence[Part]) -> Trained | None:
        pool = [(part.node, part.gpus) for part in parts]
        if not self._pool_memory.fits(pool):
            return None
        step = training_step(self._problem, self._demand, self._network, pool)
        return Trained(tuple(TrainShare(node=part.machine, gpus=part.gpus) for part in parts), None, step)


def _shares_error(islands: Sequence[Island], mesh: Mesh) -> str | None:
    """Why processes that have their packs together cannot: their shares of tokens differ."""
    for island in islands:
        parts = [part for stage in island for part in stage]
        if mesh.pipeline > 1 and len({part.share for part in parts}) > 1:
            return "mesh.pipeline: processes of one pipeline have unlike shares; state one share for their machines"
        groups = cut(parts, (mesh.tensor,) * (size_of(parts) // mesh.tensor)) if mesh.tensor > 1 else ()
        if any(len({part.share for part in group}) > 1 for group in groups):
            return "mesh.tensor: processes that split layers have unlike shares; state one share for their machines"
    return None


def _model_error(problem: Problem, mesh: Mesh) -> str | None:
    """Why the model cannot be divided like this."""
    model = problem.model
    if mesh.layers_per_stage is not None and sum(mesh.layers_per_stage) != model.layers:
        return f"mesh.layers_per_stage: {sum(mesh.layers_per_stage)} layers, and the model has {model.layers}"
    if mesh.pipeline > model.layers:
        return f"mesh.pipeline: {mesh.pipeline} stages need as many layers, and the model has {model.layers}"
    widths = {"q_heads": model.q_heads, "kv_heads": model.kv_heads}
    widths |= {"experts": model.experts} if model.experts else {"ffn": model.ffn or 0}
    for name, width in widths.items():
        if width % mesh.tensor:
            return f"mesh.tensor: {mesh.tensor} does not divide the model's {name}, {width}"
    if mesh.expert > 1 and (model.experts or 1) % mesh.expert:
        return f"mesh.expert: {mesh.expert} does not divide the model's experts, {model.experts or 0}"
    return None
