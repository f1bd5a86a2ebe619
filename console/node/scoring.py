"""Derives the scorers, the critic and the reward worker of one machine from a plan. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from console.node.config import NodeConfig
from penstock.v1 import scheduler_pb2 as pb
from services.reward.config import RewardConfig
from services.trainer.critic.config import CriticConfig
from services.trainer.scorer.config import ScorerConfig

REWARD, SCORER, CRITIC = "reward", "scorer", "critic"
_KINDS = {pb.ROLE_REWARD: REWARD, pb.ROLE_SCORER: SCORER, pb.ROLE_CRITIC: CRITIC}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPlace:
    """A process of this machine that scores or values samples."""

    kind: str
    """Of `penstock serve`."""
    gpus: tuple[int, ...] = ()
    """Indices on the machine; empty for a reward worker without one."""

    @property
    def name(self) -> str:
        """Its name on the machine."""
        return self.kind if self.kind == CRITIC or not self.gpus else f"{self.kind}-{self.gpus[0]}"


def scoring_places(plan: pb.Plan, config: NodeConfig) -> dict[str, ScoringPlace]:
    """What the plan places on this machine and its file has a section for, by name; see `scoring_misfits`."""
    found = []
    for kind, each in _mine(plan, config):
        if getattr(config, kind) is None:
            continue
        if kind != CRITIC and each.accelerator_indices:
            found += [ScoringPlace(kind=kind, gpus=(gpu,)) for gpu in each.accelerator_indices if _is_here(gpu, config)]
        elif all(_is_here(gpu, config) for gpu in each.accelerator_indices):
            found.append(ScoringPlace(kind=kind, gpus=tuple(each.accelerator_indices)))
    return {place.name: place for place in found}


def scoring_misfits(plan: pb.Plan, config: NodeConfig) -> list[str]:
    """What the plan places here and cannot be started, in words."""
    found = []
    for kind, each in _mine(plan, config):
        if getattr(config, kind) is None:
            found.append(f"a {kind}; the machine's file has no section {kind}")
        elif not all(_is_here(gpu, config) for gpu in each.accelerator_indices):
            what = {SCORER: "scorers", REWARD: "reward workers"}.get(kind, f"a {kind}")
            found.append(f"{what} on GPUs {', '.join(map(str, each.accelerator_indices))}; there are {config.gpus}")
    return found


def worker_ids(plan: pb.Plan, kind: str) -> frozenset[str]:
    """Names at the broker of all workers of a kind that the plan has on any machine; see `scoring_config`."""
    found = []
    for each in plan.assignments:
        if _KINDS.get(each.role) == kind:
            places = [ScoringPlace(kind=kind, gpus=(gpu,)) for gpu in each.accelerator_indices]
            found += [f"{each.node_id}-{place.name}" for place in places or [ScoringPlace(kind=kind)]]
    return frozenset(found)


def scoring_config(
    config: NodeConfig, place: ScoringPlace, *, free_port: int
) -> ScorerConfig | CriticConfig | RewardConfig:
    """The configuration of a process; `free_port` is for one whose own is 0."""
    base: ScorerConfig | CriticConfig | RewardConfig | None = getattr(config, place.kind)
    assert base is not None
    own = own_settings(base.listen, place, node_id=config.node_id, free_port=free_port)
    return base.model_copy(update={**own, "insecure": base.insecure or config.insecure})


def own_settings(listen: str, place: ScoringPlace, *, node_id: str, free_port: int) -> dict[str, object]:
    """What one process of a machine has beside what its file says of all of the kind, which `listen` there."""
    host, _, port = listen.rpartition(":")
    first = place.gpus[0] if place.kind != CRITIC and place.gpus else 0
    found: dict[str, object] = {"listen": f"{host}:{int(port) + first if int(port) else free_port}"}
    if place.kind == CRITIC:
        return {**found, "processes": len(place.gpus)}
    return {**found, "worker_id": f"{node_id}-{place.name}"}


def _is_here(gpu: int, config: NodeConfig) -> bool:
    return config.first_gpu <= gpu < config.gpus


def _mine(plan: pb.Plan, config: NodeConfig) -> Iterator[tuple[str, pb.Assignment]]:
    """The kind of process and the assignment of everything of that sort on this machine."""
    for each in plan.assignments:
        if each.node_id == config.node_id and (kind := _KINDS.get(each.role)) is not None:
            yield kind, each


def changed(running: Mapping[str, ScoringPlace], wanted: Mapping[str, ScoringPlace]) -> tuple[list[str], list[str]]:
    """Names of processes to stop, and to start."""
    stops = [name for name, place in running.items() if wanted.get(name) != place]
    return stops, [name for name, place in wanted.items() if running.get(name) != place]
