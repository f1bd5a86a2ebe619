"""Configures the training pool of a deployment: one trainer on the head, or torchrun on every machine of the pool."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument

RENDEZVOUS_PORT = 7307
MAX_RESTARTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMachine:
    """A machine of the pool."""

    name: str
    site: str
    gpus: int
    """Number of GPUs that train, the machine's first ones."""
    torchrun: tuple[str, ...]
    """Command line that starts its trainer processes, without `torchrun` and without `console serve ...`; empty if the
    pool is one machine, whose trainer starts its processes itself."""


def training_machines(model: CostModel, plan: PlanDocument, head_address: str) -> list[TrainingMachine]:
    """The pool; the first machine is the head."""
    found = []
    for rank, share in enumerate(plan.train):
        meeting = (
            f"--nnodes={len(plan.train)}",
            f"--node-rank={rank}",
            f"--nproc-per-node={share.gpus}",
            f"--master-addr={head_address}",
            f"--master-port={RENDEZVOUS_PORT}",
            f"--max-restarts={MAX_RESTARTS}",
        )
        found.append(
            TrainingMachine(
                name=share.node,
                site=model.nodes[share.node].region,
                gpus=share.gpus,
                torchrun=meeting if len(plan.train) > 1 else (),
            )
        )
    return found


def processes(model: CostModel, plan: PlanDocument) -> int | list[float]:
    """`trainer.processes`: one per GPU; if GPUs differ, each one's share of tokens, by its speed."""
    speeds = [model.gpu_training_rate[model.nodes[share.node].name] for share in plan.train for _ in range(share.gpus)]
    if len(set(speeds)) == 1:
        return len(speeds)
    return [round(speed / max(speeds), 3) for speed in speeds]
