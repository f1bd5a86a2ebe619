"""The configuration of a machine that follows a run's plan: what `penstock node` reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from console.config.config import LogSection
from penstock.config import NetworkConfig, Targets, apply_overrides, read_document, validate
from services.generator.config import GeneratorConfig


class NodeConfig(NetworkConfig):
    """A machine, and how a generator on it is made."""

    node_id: str = Field(min_length=1, max_length=128)
    """What the plan calls it: the problem's name of the machine, or any other of one that joins."""
    site: str = Field(default="", max_length=128)
    """Its region in the problem."""
    gpu: str = Field(min_length=1, max_length=128)
    """The problem's name of its type of GPU."""
    gpus: int = Field(default=1, ge=1, le=1024)
    """How many it has."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """US dollars, the whole machine; that of machines alike when unset."""
    scheduler: Targets
    """The scheduler of the run, host:port."""
    address: str = "127.0.0.1"
    """Name or address under which other machines reach this one."""
    dir: Path
    """Folder for the logs and configurations of its generators."""
    generator: GeneratorConfig
    """A generator of it. The plan says how many there are, of how many GPUs each, and how many samples one decodes at
    once; the one that begins at GPU i listens at the port of `listen` + 2 i, on a free one where that is 0."""
    log: LogSection = LogSection()
    """Logs of its generators."""


def read_node(path: Path, overrides: Iterable[str] = ()) -> NodeConfig:
    """The machine in a file, with dotted overrides applied. Raises ConfigError."""
    return validate(NodeConfig, apply_overrides(read_document(path), overrides), source=str(path))
