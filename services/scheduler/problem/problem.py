"""Defines a checked planning problem: cluster, network, model, workload and the cost model's constants.

Schema `rl-sched-instance/1`, described in docs/planning.md. Keys carry their units: `*_GB` and `*_GBps` are 10^9 bytes
(per second), `*_Gbps` 10^9 bits per second, `*_ms`, `*_us` and `*_s` times. A node entry with `count` 3 stands for
three equal machines, `name-0` to `name-2` unless it names them.
"""

# ruff: noqa: N815 - the schema's keys carry units as written.

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config import MAX_CONFIG_BYTES, ConfigError, StrictModel, read_document, validate
from penstock.model.model_shape import read_numbers
from services.scheduler.problem.cost_constants import CostConstants
from services.scheduler.problem.model import Model
from services.scheduler.problem.quantities import Count, Name, NotNegative, Positive
from services.scheduler.problem.workload import Workload

MAX_NODES = 10_000
MAX_GPUS = 1024
"""Most GPUs of a machine."""
SCHEMA = "rl-sched-instance/1"


class GpuType(StrictModel):
    """Capabilities of one GPU of a type."""

    tflops_bf16: Positive
    """Dense rate, 10^12 FLOP/s; fp16 if it has no bf16."""
    hbm_GB: Positive
    hbm_GBps: Positive
    ar_bus_GBps: Positive
    """Effective all-reduce bus bandwidth of each GPU within a machine."""
    ar_latency_us: NotNegative = 0.0
    """Latency of one small all-reduce within a machine."""


class NodeClass(StrictModel):
    """`count` equal machines."""

    name: Name
    gpu: Name
    gpus: int = Field(ge=1, le=MAX_GPUS)
    """GPUs in each machine."""
    count: int = Field(default=1, ge=1, le=MAX_NODES)
    region: Name = "default"
    """Machines of one region share a fast network: only their NICs count."""
    nic_Gbps: Positive = 100.0
    """NIC bandwidth of each machine."""
    price_per_gpu_hour: NotNegative = 0.0
    """Price in US dollars."""
    memory_GB: Positive | None = None
    """Main memory of each machine, for reward workers and for what trainers offload; unset: as much as reward workers
    need, and nothing is offloaded there."""
    machines: tuple[Name, ...] = Field(default=(), max_length=MAX_NODES)
    """Names of the machines, `count` of them; `name-0`, `name-1`, ... if empty."""

    def machine(self, index: int) -> str:
        """The name of one of them."""
        return self.machines[index] if self.machines else f"{self.name}-{index}"


class HostClass(StrictModel):
    """`count` machines without GPUs that are there for broker, Redis, scheduler and reward workers."""

    name: Name
    count: int = Field(default=1, ge=1, le=MAX_NODES)
    region: Name = "default"
    cores: Count | None = None
    """CPU cores of each; unset: as many as what is there needs."""
    memory_GB: Positive | None = None
    """Main memory of each, for reward workers; unset: as much as they need."""
    machines: tuple[Name, ...] = Field(default=(), max_length=MAX_NODES)
    """Names of the machines, as of those with GPUs."""

    def machine(self, index: int) -> str:
        """The name of one of them."""
        return self.machines[index] if self.machines else f"{self.name}-{index}"


class Link(StrictModel):
    """The network between two regions, the same in both directions. Pairs without an entry are not connected."""

    a: Name
    b: Name
    bw_Gbps: Positive
    latency_ms: NotNegative = 0.0


class Constraints(StrictModel):
    """Constraints on plans."""

    max_tp: int = Field(default=16, ge=1, le=1024)
    train_single_region: bool = True
    """The training pool must be in one region."""
    gen_pp: int = Field(default=1, ge=1, le=64)
    """Most pipeline stages of a generation replica, within one machine; more than 1 take an engine that has them."""
    tail_blocking: bool = False
    """The longest sample must finish within its staleness window."""


class MeasuredRate(StrictModel):
    """A measured speed; it replaces the one that the cost model would compute."""

    gpu: Name
    role: Literal["generator", "trainer", "scorer", "critic"]
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel degree of the measurement; generators only."""
    pp: int = Field(default=1, ge=1)
    """Its pipeline stages; generators only."""
    tokens_per_second: Positive
    """Rate of completion tokens of a replica, or of trained or scored tokens (prompt and completion) of one GPU; a
    critic's are those that it both values and trains on."""


class Problem(StrictModel):
    """The complete input of a plan."""

    id: Name = "problem"
    schema_: Literal["rl-sched-instance/1"] = Field(default="rl-sched-instance/1", alias="schema")
    source: Any = None
    fidelity: Any = None
    notes: Any = None
    gpu_types: dict[Name, GpuType] = Field(min_length=1, max_length=256)
    nodes: tuple[NodeClass, ...] = Field(min_length=1, max_length=MAX_NODES)
    hosts: tuple[HostClass, ...] = Field(default=(), max_length=MAX_NODES)
    links: tuple[Link, ...] = Field(default=(), max_length=MAX_NODES)
    model: Model
    workload: Workload
    cost_model: CostConstants = CostConstants()
    constraints: Constraints = Constraints()
    measured_rates: tuple[MeasuredRate, ...] = Field(default=(), max_length=MAX_NODES)
    measured: Any = None
    """Published results of a real run; not used."""
    published: Any = None
    """See `measured`."""

    @property
    def unlinked_regions(self) -> tuple[str, ...]:
        """Regions with machines that no link joins with any other, where there are others."""
        regions = dict.fromkeys(node.region for node in self.nodes)
        linked = {region for link in self.links if link.a != link.b for region in (link.a, link.b)}
        return tuple(region for region in regions if region not in linked and len(regions) > 1)

    @property
    def offload_obstacle(self) -> str | None:
        """Why its trainer cannot offload; None if it can, on machines that state `memory_GB`."""
        if not self.cost_model.train_pack_tokens:
            return "memory is only known with cost_model.train_pack_tokens; state that"
        trained = [task.name for task in self.workload.pool_tasks if task.kind == "train"]
        if len(trained) > 1:
            return f"the trainer has {trained[1]} as well, which cannot be offloaded; make it a service (is_service)"
        return None

    @model_validator(mode="after")
    def _activations_can_be_counted(self) -> Self:
        if self.cost_model.train_pack_tokens and self.model.token_ffn is None:
            raise ValueError("model.ffn: cost_model.train_pack_tokens needs it for the activations; state it")
        return self

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        known = ", ".join(self.gpu_types)
        names: set[str] = set()
        for index, node in enumerate(self.nodes):
            if node.gpu not in self.gpu_types:
                raise ValueError(f"nodes.{index}.gpu: {node.gpu!r} is not in gpu_types; known are {known}")
            if node.name in names:
                raise ValueError(f"nodes.{index}.name: {node.name!r} is used twice; rename one or raise its count")
            names.add(node.name)
        if (total := sum(node.count for node in self.nodes)) > MAX_NODES:
            raise ValueError(f"nodes: {total} machines in all, at most {MAX_NODES} are planned for")
        regions = {node.region for node in self.nodes}
        for index, link in enumerate(self.links):
            for key in ("a", "b"):
                if (region := getattr(link, key)) not in regions:
                    raise ValueError(
                        f"links.{index}.{key}: no node is in region {region!r}; there are {sorted(regions)}"
                    )
        for index, rate in enumerate(self.measured_rates):
            if rate.gpu not in self.gpu_types:
                raise ValueError(f"measured_rates.{index}.gpu: {rate.gpu!r} is not in gpu_types; known are {known}")
        return self

    @model_validator(mode="after")
    def _hosts_are_beside_nodes(self) -> Self:
        regions = {node.region for node in self.nodes}
        for index, host in enumerate(self.hosts):
            if host.region not in regions:
                raise ValueError(f"hosts.{index}.region: no node is in {host.region!r}; there are {sorted(regions)}")
        return self

    @model_validator(mode="after")
    def _machines_have_names_of_their_own(self) -> Self:
        entries: list[tuple[str, NodeClass | HostClass]] = [
            *((f"nodes.{index}", node) for index, node in enumerate(self.nodes)),
            *((f"hosts.{index}", host) for index, host in enumerate(self.hosts)),
        ]
        for field, entry in entries:
            if entry.machines and len(entry.machines) != entry.count:
                raise ValueError(
                    f"{field}.machines: names {len(entry.machines)} machines, and count is {entry.count}; "
                    "name as many, or leave them out"
                )
        names = Counter(entry.machine(index) for _, entry in entries for index in range(entry.count))
        if (twice := names.most_common(1)[0])[1] > 1:
            raise ValueError(f"nodes: {twice[0]!r} is the name of {twice[1]} machines; name each differently")
        return self


def read_problem(path: Path) -> Problem:
    """The problem in a JSON or YAML file, whose `model.path` may name a Hugging Face folder to read numbers from.

    Raises ConfigError with one line per problem found.
    """
    if path.suffix != ".json":
        return validate(Problem, _with_model(read_document(path), path), source=str(path))
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return validate(Problem, _with_model(_json_mapping(text, source=str(path)), path), source=str(path))


def _with_model(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """The document with the numbers of the model whose folder it names; those that it states itself stay."""
    model = document.get("model")
    if not isinstance(model, dict) or not isinstance(folder := model.get("path"), str):
        return document
    try:
        numbers = read_numbers(path.parent / folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: model.path: {error}") from error
    return document | {"model": numbers | {key: value for key, value in model.items() if key != "path"}}


def parse_problem(text: str, *, source: str) -> Problem:
    """The problem in a JSON text. Raises ConfigError with one line per problem found."""
    return validate(Problem, _json_mapping(text, source=source), source=source)


def _json_mapping(text: str, *, source: str) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_CONFIG_BYTES} characters; is this a planning problem?")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: must be a mapping, got {type(document).__name__}")
    return document
