"""Describes a deployment once, for the writers of every engine: its machines, and the services of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeAlias

from penstock.config import Document
from penstock.process.grace_periods import STOP_GRACE_S
from penstock.security.credentials import CLUSTER, JUDGES
from services.scheduler.problem.problem import HostClass, NodeClass

PORTS: Mapping[str, int] = {
    "redis": 7300,
    "broker": 7301,
    "environment": 7302,
    "reward": 7303,
    "trainer": 7304,
    "weights": 7305,
    "scheduler": 7306,
}
CRITIC_PORT = 7309
MORE_BROKERS_PORT = 7320
"""Of the second broker on a machine; further ones have the ports that follow."""
SCORER_PORT = 7310
"""Of the scorer on a machine's first GPU; those on others have the ports that follow."""
HOST_REWARD_PORT = 7350
"""Of the reward worker on the first machine without GPUs that has one; those on others have the ports that follow."""
GPU_REWARD_PORT = 7330
"""Of the reward worker on a machine's first GPU, likewise."""
REDIS_MEMORY_GIB = 8
"""Redis' own limit; its container has a quarter more."""
SECRET_FILES = ("ca", "cert", "key")
"""The files of `penstock certs issue`, NAME.pem, by the ends of the variables that name them."""
USER_ID = 10001
"""The user of the images."""
Files: TypeAlias = dict[str, Document | list[Document] | str]
"""Contents by path: a YAML document, several of them, or text."""
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where an engine's services find their files."""

    config: PurePath
    """Configurations of the machine's site."""
    runs: PurePath
    """Run folders, caches and logs."""
    is_container: bool
    """Whether each service has a container; otherwise `penstock run` starts those of the head."""
    names_gpus: bool = True
    """Whether a service can be given GPUs by their indices; otherwise each has some of its own, whichever they are."""


IN_CONTAINERS = Layout(config=PurePath("/config"), runs=PurePath("/runs"), is_container=True)
IN_PODS = Layout(config=PurePath("/config"), runs=PurePath("/runs"), is_container=True, names_gpus=False)
IN_FOLDERS = Layout(config=PurePath(), runs=PurePath("runs"), is_container=False)
"""Each machine starts its services in the folder of its site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What an engine keeps running on a machine."""

    name: str
    """Unique in its site."""
    kind: str
    """Key of `STOP_GRACE_S`."""
    image: str
    arguments: tuple[str, ...]
    """Of the command `penstock`; of the image's own for Redis."""
    torchrun: tuple[str, ...] = ()
    """Options of torchrun, if that starts the command."""
    port: int | None = None
    """Where it serves `grpc.health.v1`; None for what serves nothing, or not by gRPC."""
    gpus: int = 0
    memory_gib: int
    """Limit, not a measurement: what is above it is taken for a leak."""
    may_train: bool = False
    """Whether it is a machine's `penstock node` that may start the trainer, whose checkpoint it then waits for."""
    after: tuple[str, ...] = ()
    """Services that must be healthy first, on this machine or another."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its process, beside those that name certificates."""

    @property
    def grace_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        longer_s = STOP_GRACE_S["trainer"] - STOP_GRACE_S["generator"] if self.may_train else 0.0
        return STOP_GRACE_S[self.kind] + longer_s

    @property
    def is_foreign(self) -> bool:
        """Whether it runs a user's code, and has secrets and a certificate of its own instead of the machine's."""
        return self.kind == "environment"

    @property
    def ends(self) -> bool:
        """Whether it ends with the run, with exit status 0."""
        return self.kind == "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine of the plan, with its services in the order in which they start."""

    name: str
    address: str
    """How others reach it."""
    kind: NodeClass | HostClass
    """Its entry in the problem."""
    services: tuple[Service, ...]
    role: str
    """The role of its certificate."""
    is_center: bool = False
    """Whether broker or scheduler are on it, or the run's console."""
    more_roles: tuple[str, ...] = ()
    """Its further roles."""

    @property
    def site(self) -> str:
        """Its region."""
        return self.kind.region

    @property
    def all_gpus(self) -> int:
        """Its GPUs."""
        return self.kind.gpus if isinstance(self.kind, NodeClass) else 0

    @property
    def gpu(self) -> str:
        """Their type; empty if it has none."""
        return self.kind.gpu if isinstance(self.kind, NodeClass) else ""

    def has(self, kind: str) -> bool:
        """Whether a service of this kind is on it."""
        return any(service.kind == kind for service in self.services)

    @property
    def gpus(self) -> int:
        """GPUs that its services use: its first ones."""
        return max(service.gpus for service in self.services)

    @property
    def check(self) -> tuple[str, ...]:
        """Arguments of the `penstock` command that checks it, without the folder of configurations."""
        return ("doctor", f"machine-{self.name}.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Everything that an engine's writer needs."""

    run_id: str
    center: Mapping[str, str]
    """Address of every service of the run, host:port."""
    layout: Layout
    hosts: Sequence[Host]
    """Those that train first; the first one is the head."""
    has_certificates: bool
    """Whether services speak TLS, with a certificate for each machine."""
    tracing: Mapping[str, str]
    """Variables of every service that say where its spans go; no secrets."""
    configurations: Mapping[str, Document | str]
    """Files of all sites, by path: SITE/NAME."""
    weight_bytes: float
    """Of the model."""
    public: Mapping[str, str]
    """Where other sites reach the machines of `center_hosts`, by their names; empty if that is not stated."""
    has_storage: bool = False
    """Whether checkpoints are copied to object storage, so that machines that train need share no folder."""
    moving_by: str | None = None
    """The storage of checkpoints by which the trainer moves between machines; None if it stays."""
    serves_environment: bool = False
    """Whether the head serves the run's environment, to which others then show their certificates."""
    critic_on: str | None = None
    """The machine with a critic of its own that stays there, with its state; None without one."""

    @property
    def head(self) -> Host:
        """The machine of the run, and of its services but those that the plan has elsewhere."""
        return self.hosts[0]

    @property
    def center_hosts(self) -> list[Host]:
        """The machines that services of the run are on: the head, then those without GPUs that others call."""
        return [self.head, *(host for host in self.hosts if isinstance(host.kind, HostClass) and host.is_center)]

    @property
    def training(self) -> list[Host]:
        """The machines that train; several of them need a file system that all see."""
        return [host for host in self.hosts if host.role == "operator" or "trainer" in host.more_roles]

    @property
    def sites(self) -> list[str]:
        """All regions, the head's first."""
        return list(dict.fromkeys(host.site for host in self.hosts))

    def at(self, site: str) -> list[Host]:
        """The machines of a site."""
        return [host for host in self.hosts if host.site == site]

    def variables(self, folder: str) -> dict[str, str]:
        """The variables that name certificate files in a folder, for a process that calls the other services."""
        return environment(folder) | (environment(folder, JUDGES) if self.serves_environment else {})

    def files_at(self, site: str) -> dict[str, Document | str]:
        """A site's configurations by name."""
        start = f"{site}/"
        return {path.removeprefix(start): text for path, text in self.configurations.items() if path.startswith(start)}


def broker_name(index: int) -> str:
    """The name of a broker's configuration and container."""
    return "broker" if index == 0 else f"broker-{index}"


def host_reward(machine: str) -> str:
    """The name of the configuration and container of the reward worker on a machine without GPUs."""
    return f"reward-{machine}"


def broker_port(index: int) -> int:
    """Where it listens."""
    return PORTS["broker"] if index == 0 else MORE_BROKERS_PORT + index - 1


def memory_gib(kind: str, *, weight_bytes: float = 0.0, gpus: int = 0) -> int:
    """A limit on a service's memory, GiB, by the model's weights and its GPUs.

    Trainers hold the newest weights, the previous ones for a delta and what a checkpoint gathers; generators read new
    weights beside those of the engine; each process of a GPU has PyTorch and CUDA in memory.
    """
    weights_gib = weight_bytes / _GIB
    limits: dict[str, float] = {
        "broker": 4,
        "environment": 4,
        "redis": REDIS_MEMORY_GIB * 1.25,
        "reward": 4,
        "run": 2,
        "scheduler": 2,
        "trainer": 8 + 8 * max(1, gpus) + 4 * weights_gib,
        "node": 8 + 8 * max(1, gpus) + 2 * weights_gib,
    }
    return round(limits[kind])


def environment(folder: str, prefix: str = CLUSTER) -> dict[str, str]:
    """The variables of that prefix that name a machine's certificate files in a folder."""
    return {f"{prefix}_TLS_{name.upper()}": f"{folder}/{name}.pem" for name in SECRET_FILES}


def without_empty(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document without its empty values."""
    return {key: value for key, value in document.items() if value not in (None, (), [], {})}
