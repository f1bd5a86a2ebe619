"""Decides whether a mesh has the memory to train, by the trainer's own formula, island by island and stage by stage.

Every GPU holds its share of weights, gradients and moments of its part of the model, and takes what a forward and
backward pass needs (`penstock.model.training_memory`). As in the trainer, all recompute their layers or none does. With
offload the share is in the machine's memory instead (`offload`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from penstock.model.training_memory import TrainingMode, working_bytes
from services.scheduler.cost_model.demand import Demand
from services.scheduler.cost_model.pool_memory import model_shape
from services.scheduler.meshes.islands import Island, size_of
from services.scheduler.meshes.offload import memory_error
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.problem import Problem

_RECOMPUTES = (False, True)


class MeshMemory:
    """The memory rule of one problem, which states `train_pack_tokens`.

    Args:
        problem: The problem.
        demand: Its demand.
        usable_bytes: Usable memory of a GPU, by node entry.
    """

    def __init__(self, problem: Problem, demand: Demand, usable_bytes: Mapping[str, float]) -> None:
        self._problem, self._demand, self._shape = problem, demand, model_shape(problem)
        self._pack_tokens = problem.cost_model.train_pack_tokens
        self._state_bytes = demand.training_state_bytes
        self._usable_bytes = usable_bytes
        self.needed_bytes = cache(self._needed_bytes)
        """Of one GPU; its arguments are those of `_needed_bytes`."""
        self.most_layers = cache(self._most_layers)

    def error(self, islands: Sequence[Island], mesh: Mesh) -> str | None:
        """Why this mesh cannot train; None if it can."""
        if mesh.offload and (lacking := memory_error(self._problem, self._demand, islands)) is not None:
            return lacking
        missing: list[str] = []
        for recomputes in _RECOMPUTES:
            if (found := self._lack(islands, mesh, recomputes=recomputes)) is None:
                return None
            missing.append(found)
        return missing[-1]

    def _lack(self, islands: Sequence[Island], mesh: Mesh, *, recomputes: bool) -> str | None:
        stages = layers_of(mesh, self._shape.num_layers)
        for number, island in enumerate(islands):
            for stage, (parts, num_layers) in enumerate(zip(island, stages, strict=True)):
                needed = self.needed_bytes(
                    size_of(parts) // mesh.tensor,
                    tensor=mesh.tensor,
                    num_layers=num_layers,
                    is_first=stage == 0,
                    is_last=stage == len(stages) - 1,
                    recomputes=recomputes,
                    expert=mesh.expert,
                    offload=mesh.offload,
                )
                for part in parts:
                    if self._usable_bytes[part.node.name] < needed:
                        where = f"stage {stage} of island {number}" if len(stages) > 1 else f"island {number}"
                        return (
                            f"training needs {needed / 1e9:.1f} GB of each of the {size_of(parts)} GPUs of {where}, "
                            f"and a GPU of {part.node.name} offers {self._usable_bytes[part.node.name] / 1e9:.1f} GB"
                        )
        return None

    def fits_whole(self, name: str, num_shards: int, *, tensor: int = 1, recomputes: bool) -> bool:
        """Whether a GPU of that entry can be one of those that shard a copy which is not cut into stages."""
        needed = self.needed_bytes(
            num_shards,
            tensor=tensor,
            num_layers=self._shape.num_layers,
            is_first=True,
            is_last=True,
            recomputes=recomputes,
        )
        return needed <= self._usable_bytes[name]

    def _most_layers(self, name: str, num_shards: int, *, is_first: bool, is_last: bool, recomputes: bool) -> int:
        """Layers that GPUs of that entry can hold as such a stage; 0 if not even one."""
        low, high = 0, self._shape.num_layers - 1
        while low < high:
            middle = (low + high + 1) // 2
            needed = self.needed_bytes(
                num_shards,
                tensor=1,
                num_layers=middle,
                is_first=is_first,
                is_last=is_last,
                recomputes=recomputes,
            )
            low, high = (middle, high) if needed <= self._usable_bytes[name] else (low, middle - 1)
        return low

    def _needed_bytes(  # the directions of its mesh
        self,
        num_shards: int,
        *,
        tensor: int,
        num_layers: int,
        is_first: bool,
        is_last: bool,
        recomputes: bool,
        expert: int = 1,
        offload: bool = False,
    ) -> float:
        whole = self._shape.stage(num_layers, is_first=is_first, is_last=is_last)
        shape = whole.split(tensor)
        mode = TrainingMode(
            num_shards=num_shards,
            pack_tokens=self._pack_tokens,
            is_half=True,
            checkpoints_layers=recomputes,
            is_stage=not (is_first and is_last),
            num_expert_shards=expert,
            offloads=offload,
        )
        if offload:
            return working_bytes(shape, mode)
        state = self._state_bytes * shape.num_params / self._shape.num_params
        return state / num_shards + working_bytes(shape, mode)


def layers_of(mesh: Mesh, num_layers: int) -> tuple[int, ...]:
    """Layers of each stage: stated, or as the trainer divides them by itself."""
    stages = mesh.pipeline
    return mesh.layers_per_stage or tuple((num_layers + stages - 1 - stage) // stages for stage in range(stages))
