"""Derives the scorers and the reward worker of one machine from a plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from console.node.config import NodeConfig
from penstock.v1 import scheduler_pb2 as pb
from services.reward.config import RewardConfig
from services.trainer.scorer.config import ScorerConfig

REWARD, SCORER = "reward", "scorer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPlace:
    """A process of this machine that scores."""

    kind: str
    """Of `penstock serve`."""
    gpu: int | None = None
    """Its GPU's index on the machine; None for a reward worker."""

    @property
    def name(self) -> str:
        """Its name on the machine."""
        return self.kind if self.gpu is None else f"{self.kind}-{self.gpu}"


def scoring_places(plan: pb.Plan, config: NodeConfig) -> dict[str, ScoringPlace]:
    """What the plan places on this machine and its file has a section for, by name; see `scoring_misfits`."""
    found = [
        ScoringPlace(kind=SCORER, gpu=gpu)
        for each in _mine(plan, config)
        if each.role == pb.ROLE_SCORER and config.scorer is not None
        for gpu in each.accelerator_indices
        if config.first_gpu <= gpu < config.gpus
    ]
    if config.reward is not None and any(each.role == pb.ROLE_REWARD for each in _mine(plan, config)):
        found.append(ScoringPlace(kind=REWARD))
    return {place.name: place for place in found}


def scoring_misfits(plan: pb.Plan, config: NodeConfig) -> list[str]:
    """What the plan places here and cannot be started, in words."""
    found = []
    for each in _mine(plan, config):
        section = {pb.ROLE_SCORER: SCORER, pb.ROLE_REWARD: REWARD}.get(each.role)
        if section is not None and getattr(config, section) is None:
            found.append(f"a {section}; the machine's file has no section {section}")
        elif section == SCORER and not all(config.first_gpu <= gpu < config.gpus for gpu in each.accelerator_indices):
            found.append(f"scorers on GPUs {', '.join(map(str, each.accelerator_indices))}; there are {config.gpus}")
    return found


def scoring_config(config: NodeConfig, place: ScoringPlace, *, free_port: int) -> ScorerConfig | RewardConfig:
    """The configuration of a process; `free_port` is for one whose own is 0."""
    base: ScorerConfig | RewardConfig | None = config.scorer if place.kind == SCORER else config.reward
    assert base is not None
    host, _, port = base.listen.rpartition(":")
    own = int(port) + (place.gpu or 0) if int(port) else free_port
    return base.model_copy(
        update={
            "insecure": base.insecure or config.insecure,
            "listen": f"{host}:{own}",
            "worker_id": f"{config.node_id}-{place.name}",
        }
    )


def _mine(plan: pb.Plan, config: NodeConfig) -> list[pb.Assignment]:
    return [each for each in plan.assignments if each.node_id == config.node_id]


def changed(running: Mapping[str, ScoringPlace], wanted: Mapping[str, ScoringPlace]) -> tuple[list[str], list[str]]:
    """Names of processes to stop, and to start."""
    return [name for name in running if name not in wanted], [name for name in wanted if name not in running]
