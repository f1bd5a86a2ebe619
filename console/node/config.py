"""Defines the configuration of a machine that follows a run's plan, which `penstock node` reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from console.config.sections import LogSection
from penstock.config import LocalPath, NetworkConfig, Targets, apply_overrides, read_document, validate
from penstock.storage.addresses import StoredAddress
from services.broker.config import BrokerConfig
from services.generator.config import GeneratorConfig
from services.reward.config import RewardConfig
from services.scheduler.config import SchedulerConfig
from services.trainer.config import TrainerConfig
from services.trainer.critic.config import CriticConfig
from services.trainer.scorer.config import ScorerConfig


class NodeTrainerConfig(TrainerConfig):
    """The trainer that a machine starts where the plan has it there."""

    run_dir: LocalPath
    """The run's own folder on this machine, its `run.dir`/`run.id`, which all machines that may train share. A machine
    that does not see the run there is not planned to train, unless it has `checkpoint_storage`."""
    checkpoint_storage: StoredAddress | None = None
    """The run's `run.checkpoint_storage`, from which a trainer goes on here: `run_dir` is then this machine's own."""
    rendezvous_port: int = Field(default=7307, ge=1, le=65535)
    """Where the processes of several machines meet: a port of the first of them, the same in the files of all."""


class NodeConfig(NetworkConfig):
    """A machine, and the configuration of its generators."""

    node_id: str = Field(min_length=1, max_length=128)
    """Its name in the plan: the problem's name of the machine, or any other name for one that joins."""
    site: str = Field(default="", max_length=128)
    """Its region in the problem."""
    gpu: str = Field(min_length=1, max_length=128)
    """Its GPU type's name in the problem."""
    gpus: int = Field(default=1, ge=1, le=1024)
    """Number of its GPUs."""
    first_gpu: int = Field(default=0, ge=0, le=1024)
    """Index of the first GPU that this process is given; those before it train in another container."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """US dollars for the whole machine; if unset, the price of similar machines."""
    scheduler: Targets
    """The scheduler of the run, host:port."""
    address: str = "127.0.0.1"
    """Name or address under which other machines reach this one."""
    dir: Path
    """Folder for the logs and configurations of its processes."""
    generator: GeneratorConfig
    """Configuration of its generators. The plan sets their number, their GPUs and how many samples each decodes at
    once; the one that begins at GPU i listens at the port of `listen` + 2 i, or on a free one if that port is 0."""
    trainer: NodeTrainerConfig | None = None
    """Configuration of the trainer, at an address that the run's `endpoints.trainer` names; without it the plan may
    train elsewhere only. `state_dir` is ignored: the run's console resumes the run."""
    scorer: ScorerConfig | None = None
    """Configuration of its scorers, if a plan may have some here; the plan says on which GPUs. The one on GPU i listens
    at the port of `listen` + i, or on a free one if that port is 0."""
    reward: RewardConfig | None = None
    """Configuration of its reward workers, if a plan may have some here: one without a GPU, or one for each GPU that
    the plan says, with ports as scorers have them."""
    critic: CriticConfig | None = None
    """Configuration of a critic of its own, if a plan may have it here, at the address that the run's
    `endpoints.critic` names; the plan says on which GPUs, and so over how many processes it is sharded."""
    log: LogSection = LogSection()
    """Logs of its processes."""


class HostConfig(NetworkConfig):
    """A machine without GPUs that a plan has for broker, Redis, scheduler or a reward worker."""

    node_id: str = Field(min_length=1, max_length=128)
    """Its name in the plan."""
    dir: Path
    """Folder for the state of its Redis, and for logs and configurations of its processes."""
    brokers: tuple[BrokerConfig, ...] = ()
    """Configuration of each broker that is here. A Redis is started beside them, in the folder, for those that state no
    `redis_url`."""
    scheduler: SchedulerConfig | None = None
    """Configuration of the scheduler, if it is here."""
    reward: RewardConfig | None = None
    """Configuration of a reward worker, if one is here; it listens at a free port if that of `listen` is 0."""
    client_wait_s: float = Field(default=0.0, ge=0, le=3600)
    """How long after SIGTERM its brokers keep serving while clients are connected: for machines that are all stopped at
    the same time, where the trainer still writes a checkpoint. A second SIGTERM ends them immediately."""
    log: LogSection = LogSection()
    """Logs of its processes."""


def read_machine(path: Path, overrides: Iterable[str] = ()) -> NodeConfig | HostConfig:
    """Load a machine that runs `penstock node`, with dotted overrides applied. Raises ConfigError.

    One whose file has neither `generator` nor `gpu` is a host.
    """
    document = apply_overrides(read_document(path), overrides)
    if "generator" in document or "gpu" in document:
        return validate(NodeConfig, document, source=str(path))
    return validate(HostConfig, document, source=str(path))


def read_nodes(paths: Iterable[Path]) -> dict[Path, NodeConfig]:
    """Those of the files that are of machines with GPUs. Raises ConfigError."""
    found = {path: read_machine(path) for path in paths}
    return {path: config for path, config in found.items() if isinstance(config, NodeConfig)}


def device_differences(path: Path, config: NodeConfig, *, gpu: str, gpus: int, source: str) -> list[str]:
    """Where a machine's file states other GPUs than it is known to have; one line each.

    Args:
        path: The machine's file.
        config: What it states.
        gpu: Its GPU type.
        gpus: How many of them.
        source: Who says so.
    """
    problems = []
    if config.gpu != gpu:
        problems.append(f"{path}: gpu: {config.gpu!r}, and {source} has {gpu!r} for {config.node_id}; set gpu to that")
    if config.gpus != gpus:
        problems.append(
            f"{path}: gpus: {config.gpus}, and {source} has {gpus} for {config.node_id}; set gpus to that, or probe "
            "the machine again (penstock probe) and plan with the result"
        )
    return problems
