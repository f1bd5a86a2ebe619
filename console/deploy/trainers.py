"""Configures the training pool of a deployment: one trainer on the head, or torchrun on every machine of the pool.

The processes stand in the plan's mesh: their ranks follow the plan's list of machines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.config import ConfigError, Document
from penstock.process.grace_periods import LAST_ACT_S
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import SHARE_DIGITS, PlanDocument

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
    pool is one machine, or tried on one, whose trainer starts its processes itself."""


def training_machines(
    model: CostModel, plan: PlanDocument, *, address: str | None, moves: bool = False
) -> list[TrainingMachine]:
    """The pool; the first machine is the head. All of them are one host if that has an `address`.

    Where the trainer moves, machines start it as the plan in force says, without torchrun.
    """
    head_address = address or plan.train[0].node
    found = []
    for rank, share in enumerate(plan.train):
        meeting = (
            f"--nnodes={len(plan.train)}",
            f"--node-rank={rank}",
            f"--nproc-per-node={share.gpus}",
            f"--master-addr={head_address}",
            f"--master-port={RENDEZVOUS_PORT}",
            f"--max-restarts={MAX_RESTARTS}",
            # Its own 30 s would cut off a last checkpoint.
            f"--shutdown-timeout={LAST_ACT_S['trainer']:.0f}",
        )
        found.append(
            TrainingMachine(
                name=share.node,
                site=model.nodes[share.node].region,
                gpus=share.gpus,
                torchrun=meeting if len(plan.train) > 1 and address is None and not moves else (),
            )
        )
    return found


def trainer_section(model: CostModel, plan: PlanDocument, stated: Document) -> Document:
    """The section `trainer` of a run: one process per GPU, in the plan's mesh; without one, with tokens by speed.

    Packs are those that the plan was computed for, unless the run states its own.

    Args:
        model: The problem and its cost model.
        plan: Who trains.
        stated: What the run's own configuration has there.
    """
    if (pack_tokens := model.problem.cost_model.train_pack_tokens) > 0:
        stated = {"tokens_per_pack": pack_tokens, **stated}
    if plan.mesh is None:
        rates = (share.share or model.gpu_training_rate[model.nodes[share.node].name] for share in plan.train)
        return {**stated, "processes": _processes(plan, rates)}
    if stated.get("parallel"):
        raise ConfigError("trainer.parallel: the plan states a mesh of its own; leave it out")
    for key, value in (("offload", False), ("device", "cpu")):
        if plan.mesh.offload and stated.get(key) == value:
            shown = str(value).lower()
            raise ConfigError(f"trainer.{key}: {shown}, and in the plan GPUs offload the trainer's state; leave it out")
    return {**stated, **mesh_settings(plan)}


def moving_section(model: CostModel, stated: Document) -> Document:
    """The section `trainer` of a run whose plan says how many processes there are, in which mesh."""
    for key in ("parallel", "processes"):
        if stated.get(key):
            raise ConfigError(f"trainer.{key}: --moves-trainer: the plan in force sets it; leave it out")
    pack_tokens = model.problem.cost_model.train_pack_tokens
    return {"tokens_per_pack": pack_tokens, **stated} if pack_tokens else stated


def mesh_settings(plan: PlanDocument) -> Document:
    """`processes`, `parallel` and, where it is planned, `offload` of the section `trainer`, by a plan with a mesh."""
    assert plan.mesh is not None
    shares = (share.share or 1.0 for share in plan.train)
    settings = {"processes": _processes(plan, shares), "parallel": plan.mesh.parallel(plan.num_processes)}
    return {**settings, "offload": True} if plan.mesh.offload else settings


def _processes(plan: PlanDocument, shares: Iterable[float]) -> int | list[float]:
    """One per GPU; if shares of machines differ, each one's."""
    own = [share for trains, share in zip(plan.train, shares, strict=True) for _ in range(trains.gpus)]
    if len(set(own)) == 1:
        return len(own)
    return [round(share / max(own), SHARE_DIGITS) for share in own]
