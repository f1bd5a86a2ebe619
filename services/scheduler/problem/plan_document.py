"""Defines the plan document: which machines generate, with which parallelism, and which train, and in what mesh.

    {"gen":   [{"node": "h20-0", "tp": 2, "pp": 2, "count": 2, "batch": 96}],
     "train": [{"node": "h800-0", "gpus": 8, "share": 1.0}, {"node": "h20-1", "gpus": 4, "share": 0.3}],
     "mesh":  {"islands": [8, 4]},
     "score": [{"node": "h20-1", "gpus": 1}],
     "reward": ["h20-0"],
     "critic": {"node": "h20-1", "gpus": 2},
     "broker": {"node": "cpu-0"}, "scheduler": "cpu-0",
     "relay": [{"site": "oslo", "node": "h20-0"}]}

`count` replicas on a machine, of `pp` stages of `tp` GPUs each, which decode `batch` samples at once; `gpus` of a
machine in the training pool, one process of the trainer each, whose ranks follow the list. The first machine of the
pool is the head, where the trainer's first process is; it sends weights to generators over its region's links. Without
a mesh all processes shard one copy of the model, and tokens follow the GPUs' speed. Each GPU of `score` has a scorer,
and each machine of `reward` a reward worker; without it the head has one. Reward workers that take a GPU each are in
`reward_gpus` instead, as scorers are in `score`. A critic of its own is sharded over its GPUs, which are beside the
trainer's or the trainer's own. Redis is where the broker is; broker and scheduler are on the head if the plan does not
name their machines. The generators of a `relay` fetch each version over the link of their site and pass it on there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from penstock.config import StrictModel, read_document, validate
from services.scheduler.problem.mesh import Count, Mesh
from services.scheduler.problem.problem import MAX_NODES, HostClass, NodeClass, Problem

SHARE_DIGITS = 4
"""Of a share of tokens, where the largest is 1."""


class Layout(NamedTuple):
    """How a replica uses its GPUs."""

    tp: int
    """GPUs that split each layer between them."""
    pp: int = 1
    """Stages of layers, each of `tp` GPUs."""

    @property
    def gpus(self) -> int:
        """Of the whole replica."""
        return self.tp * self.pp


class Replicas(StrictModel):
    """Equal generation replicas on one machine."""

    node: str
    tp: Count = 1
    """GPUs of each replica that split layers between them."""
    pp: Count = 1
    """Stages of layers of each replica, of `tp` GPUs each."""
    count: Count = 1
    batch: int | None = Field(default=None, ge=1, le=1_000_000)
    """Samples that each decodes at once; unset: as many as its memory holds."""

    @property
    def layout(self) -> Layout:
        """How each uses its GPUs."""
        return Layout(self.tp, self.pp)

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.layout.gpus * self.count


class TrainShare(StrictModel):
    """The part of one machine that is in the training pool."""

    node: str
    gpus: Count
    share: float | None = Field(default=None, gt=0, le=1e6)
    """Tokens of each of its processes, in any unit that all of the pool have. Unset for all: by the GPUs' speed, or in
    a mesh as many for each."""


class GpuWorkers(StrictModel):
    """Scorers, or reward workers with a model, on one machine."""

    node: str
    gpus: Count = 1
    """A process each, with a whole copy of its model."""


class Broker(StrictModel):
    """The broker and its Redis."""

    node: str
    """Machine of both, which may be one without GPUs."""
    count: int = Field(default=1, ge=1, le=64)
    """Broker processes on that Redis."""

    @property
    def token_shards(self) -> int:
        """`policy.token_shards` of the run, by which they share its tokens: four for each; one has none."""
        return 4 * self.count if self.count > 1 else 1


class Relay(StrictModel):
    """Who brings new weights to a site other than the head's."""

    site: str
    """Region in the problem."""
    node: str
    """Machine of it whose generators fetch a version first; the others of the site take it from them."""


class CriticPlace(StrictModel):
    """Where a critic of its own is: on one machine."""

    node: str
    gpus: Count = 1
    """A process each, over which it is sharded."""
    is_beside_trainer: bool = False
    """On the GPUs of the machine that train, all of them, which it shares; otherwise on others."""


class PlanDocument(StrictModel):
    """Roles of all machines; the cost model judges nothing else."""

    gen: tuple[Replicas, ...] = Field(default=(), max_length=8 * MAX_NODES)
    train: tuple[TrainShare, ...] = Field(default=(), max_length=MAX_NODES)
    mesh: Mesh | None = None
    score: tuple[GpuWorkers, ...] = Field(default=(), max_length=MAX_NODES)
    reward: tuple[str, ...] = Field(default=(), max_length=MAX_NODES)
    critic: CriticPlace | None = None
    reward_gpus: tuple[GpuWorkers, ...] = Field(default=(), max_length=MAX_NODES)
    broker: Broker | None = None
    """Unset: on the head."""
    scheduler: str | None = None
    """Its machine; unset: the head."""
    relay: tuple[Relay, ...] = Field(default=(), max_length=MAX_NODES)
    """At most one a site; at others the first generator that asks for a version fetches it."""

    @field_validator("critic", mode="before")
    @classmethod
    def _critic_is_on_one_machine(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            raise ValueError(
                f"names {len(value)} machines; the processes of a critic are on one, so name one with gpus"
            )
        return value

    @property
    def center(self) -> dict[str, str]:
        """Machines of `broker` (with Redis) and `scheduler`; of a plan that trains nowhere, those that it states."""
        head = self.train[0].node if self.train else None
        found = {"broker": self.broker.node if self.broker is not None else head, "scheduler": self.scheduler or head}
        return {service: name for service, name in found.items() if name is not None}

    @property
    def num_processes(self) -> int:
        """Of the trainer."""
        return sum(share.gpus for share in self.train)

    def places(self) -> Iterator[tuple[str, str, int]]:
        """The field, machine and number of GPUs of everything that it places, but broker and scheduler.

        Those do not move, so that a plan goes on where its problem has lost their machine.
        """
        for index, replicas in enumerate(self.gen):
            yield f"gen.{index}.node", replicas.node, replicas.gpus
        for index, share in enumerate(self.train):
            yield f"train.{index}.node", share.node, share.gpus
        for index, scorers in enumerate(self.score):
            yield f"score.{index}.node", scorers.node, scorers.gpus
        for index, name in enumerate(self.reward):
            yield f"reward.{index}", name, 0
        for index, relay in enumerate(self.relay):
            yield f"relay.{index}.node", relay.node, 0
        for index, workers in enumerate(self.reward_gpus):
            yield f"reward_gpus.{index}.node", workers.node, workers.gpus
        if self.critic is not None:
            yield "critic.node", self.critic.node, 0 if self.critic.is_beside_trainer else self.critic.gpus

    def stated(self) -> dict[str, Any]:
        """What it states, for JSON and YAML."""
        found = self.model_dump(mode="json", exclude_none=True)
        for key in ("score", "reward", "reward_gpus", "relay"):
            if not found[key]:
                del found[key]
        for each in found["gen"]:
            if each["pp"] == 1:
                del each["pp"]
        if "mesh" in found:
            unused = {"expert": 1, "offload": False}
            found["mesh"] = {key: value for key, value in found["mesh"].items() if value != unused.get(key)}
        if "critic" in found and not found["critic"]["is_beside_trainer"]:
            del found["critic"]["is_beside_trainer"]
        if found.get("broker", {}).get("count") == 1:
            del found["broker"]["count"]
        return found


def read_plan(path: Path) -> PlanDocument:
    """A plan from a file: a bare plan, or the output of `penstock plan --json`. Raises ConfigError."""
    found = read_document(path)
    return validate(PlanDocument, found["rm1_plan"] or {} if "rm1_plan" in found else found, source=str(path))


def node_classes(problem: Problem) -> dict[str, NodeClass]:
    """Each machine's entry in the problem, by the machine's id; in the problem's order."""
    return {node.machine(index): node for node in problem.nodes for index in range(node.count)}


def host_classes(problem: Problem) -> dict[str, HostClass]:
    """The same of machines without GPUs."""
    return {host.machine(index): host for host in problem.hosts for index in range(host.count)}


def placement_error(plan: PlanDocument, nodes: Mapping[str, NodeClass], hosts: Collection[str] = ()) -> str | None:
    """Why the machines cannot fit the plan, naming the field; None if they can.

    The cost model checks whether the model fits into memory. Reward workers may be on `hosts`, machines without GPUs.
    """
    if (error := _pool_error(plan) or _critic_error(plan)) is not None:
        return error
    used: Counter[str] = Counter()
    for field, node, gpus in plan.places():
        if node in hosts and field.startswith("reward."):
            continue
        if node not in nodes:
            return f"{field}: there is no machine {node!r}"
        used[node] += gpus
    for node, gpus in used.items():
        if gpus > nodes[node].gpus:
            return f"machine {node} has {nodes[node].gpus} GPUs, and the plan uses {gpus}"
    return None


def _critic_error(plan: PlanDocument) -> str | None:
    """Why the critic is not where the trainer is; None if it need not be, or is."""
    critic = plan.critic
    if critic is None or not critic.is_beside_trainer:
        return None
    gpus = next((share.gpus for share in plan.train if share.node == critic.node), 0)
    if gpus == critic.gpus:
        return None
    return (
        f"critic.gpus: {critic.gpus}, and {gpus} of {critic.node} train; beside the trainer it is on all of these: "
        "name their number, or leave out is_beside_trainer"
    )


def _pool_error(plan: PlanDocument) -> str | None:
    """Why a machine is listed twice, its processes are no mesh, or their shares incomplete."""
    for index, name in enumerate(trains := [share.node for share in plan.train]):
        if name in trains[:index]:
            return f"train.{index}.node: {name!r} is listed twice; add its gpus up"
    if plan.reward and plan.reward_gpus:
        return "reward_gpus: stated, and reward as well; reward workers have a GPU each, or none"
    for index, name in enumerate(plan.reward):
        if name in plan.reward[:index]:
            return f"reward.{index}: {name!r} is listed twice; a machine has one reward worker"
    unset = [index for index, share in enumerate(plan.train) if share.share is None]
    if unset and len(unset) < len(plan.train):
        return f"train.{unset[0]}.share: unset, and others state theirs; state it for all machines of the pool, or none"
    return None if plan.mesh is None else plan.mesh.error(plan.num_processes)
