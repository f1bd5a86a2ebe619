"""Computes what it takes to train from the machines' memory: what goes to the GPUs and back, and AdamW's step there.

FSDP2 sends each process' shard of a layer up in float32 whenever the layer is gathered, twice a pass, and the gradient
of the shard back; a frozen model's shard goes up once. A share of the computation hides that, and nothing the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.model.training_memory import GRADIENT_BYTES, MASTER_BYTES, SAVED_BYTES, STATE_BYTES
from services.scheduler.cost_model.demand import Demand
from services.scheduler.meshes.islands import Island, Part
from services.scheduler.problem.problem import Problem

_STEP_BYTES = STATE_BYTES + SAVED_BYTES + 3 * GRADIENT_BYTES
"""Of a parameter in AdamW's step: all is read, all but the gradient written; before, gradients are read for their norm,
and read and written as they are scaled."""
_USABLE = 0.9
"""Of a machine's memory, as the trainer itself counts."""


def moved_s(problem: Problem, *, num_params: float, num_passes: float, num_scoring: float) -> float:
    """Time in which one process sends its shard up, and gradients back.

    Args:
        problem: The problem.
        num_params: Of the shard.
        num_passes: Forward and backward passes in a step.
        num_scoring: Forward passes alone.
    """
    sent = (2 * MASTER_BYTES + GRADIENT_BYTES) * num_passes + MASTER_BYTES * num_scoring
    return sent * num_params / (problem.cost_model.host_link_GBps * 1e9)


def optimizer_s(problem: Problem, islands: Sequence[Island], *, num_params: float) -> float:
    """AdamW's step on the machine with the most of it; `num_params` are a copy's, over equal islands."""
    shard = num_params / _island_size(islands)
    most = max(_processes(islands).values())
    return _STEP_BYTES * shard * most / (problem.cost_model.host_memory_GBps * 1e9)


def memory_error(problem: Problem, demand: Demand, islands: Sequence[Island]) -> str | None:
    """Which machine lacks memory for what its processes rest there, with copies of published weights; None if none."""
    if _island_size(islands) == 1:
        return "mesh.offload: a copy in one process, and FSDP offloads only what it shards; leave it out"
    each = (demand.training_state_bytes + 2.0 * problem.model.params) / _island_size(islands)
    nodes = {part.machine: part.node for part in _parts(islands)}
    for machine, count in _processes(islands).items():
        if (memory_GB := nodes[machine].memory_GB) is None:
            return f"mesh.offload: memory_GB of {machine} is unset; state it"
        if count * each > _USABLE * memory_GB * 1e9:
            return (
                f"mesh.offload: {count} processes on {machine} rest {count * each / 1e9:.1f} GB in its memory, and of "
                f"memory_GB {memory_GB:.1f} they may take {_USABLE * memory_GB:.1f}"
            )
    return None


def _parts(islands: Sequence[Island]) -> list[Part]:
    return [part for island in islands for stage in island for part in stage]


def _processes(islands: Sequence[Island]) -> Counter[str]:
    """Of each machine."""
    found = Counter[str]()
    for part in _parts(islands):
        found[part.machine] += part.gpus
    return found


def _island_size(islands: Sequence[Island]) -> int:
    return sum(part.gpus for part in _parts(islands[:1]))
