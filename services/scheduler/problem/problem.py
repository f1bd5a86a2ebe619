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
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.config import MAX_CONFIG_BYTES, ConfigError, StrictModel, read_document, validate
from penstock.model.model_shape import read_numbers
from services.scheduler.problem.output_lengths import OutputLengths

MAX_NODES = 10_000
MAX_GPUS = 1024
"""Most GPUs of a machine."""
SCHEMA = "rl-sched-instance/1"

MAX_NUMBER = 1e15
"""Upper bound of any quantity; keeps the arithmetic finite."""

Positive = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Share = Annotated[float, Field(ge=1e-6, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


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
    """Main memory of each machine that reward workers may take; unset: as much as they need."""
    machines: tuple[Name, ...] = Field(default=(), max_length=MAX_NODES)
    """Names of the machines, `count` of them; `name-0`, `name-1`, ... if empty."""

    def machine(self, index: int) -> str:
        """The name of one of them."""
        return self.machines[index] if self.machines else f"{self.name}-{index}"


class HostClass(StrictModel):
    """`count` machines without GPUs that are there for broker, Redis and scheduler."""

    name: Name
    count: int = Field(default=1, ge=1, le=MAX_NODES)
    region: Name = "default"
    machines: tuple[Name, ...] = Field(default=(), max_length=MAX_NODES)
    """Names of the machines, as of those with GPUs."""

    def machine(self, index: int) -> str:
        """The name of one of them."""
        return self.machines[index] if self.machines else f"{self.name}-{index}"


_GATED_MATRICES = 3
"""Of a feed-forward network with a gate."""


class Link(StrictModel):
    """The network between two regions, the same in both directions. Pairs without an entry are not connected."""

    a: Name
    b: Name
    bw_Gbps: Positive
    latency_ms: NotNegative = 0.0


class Model(StrictModel):
    """The model to train."""

    name: str = ""
    params: Positive
    layers: Count
    hidden: Count
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    ffn: Count | None = None
    """Width of the feed-forward network that every token passes; without effect in a mixture of experts."""
    vocab: Count
    tied_embeddings: bool = False
    experts: Count | None = None
    """Experts of each layer of a mixture, gated networks all; unset for a dense model."""
    experts_per_token: Count | None = None
    """Of these, those that a token is sent to."""
    expert_ffn: Count | None = None
    """Width of an expert."""
    expert_layers: Count | None = None
    """Layers that have experts; unset: all."""
    shared_ffn: Count | None = None
    """Width of what all tokens pass beside their experts; unset if there is nothing."""
    weight_bytes: Positive = 2.0
    """Bytes per parameter, in generation."""
    kv_bytes: Positive = 2.0
    """Bytes per element of the KV cache."""

    @property
    def expert_params(self) -> float:
        """Of all experts of all layers; 0 in a dense model."""
        layers = self.layers if self.expert_layers is None else self.expert_layers
        return layers * (self.experts or 0) * _GATED_MATRICES * self.hidden * (self.expert_ffn or 0)

    @property
    def expert_share(self) -> float:
        """Of the experts, those that a token is sent to; 1 in a dense model."""
        return (self.experts_per_token or 0) / self.experts if self.experts else 1.0

    @property
    def token_ffn(self) -> int | None:
        """Width of the feed-forward networks that a token passes together; None if it is not stated."""
        if self.experts is None:
            return self.ffn
        return (self.experts_per_token or 0) * (self.expert_ffn or 0) + (self.shared_ffn or 0)

    @model_validator(mode="after")
    def _is_more_than_its_embedding(self) -> Self:
        # The rest is multiplied with each token: without it, costs would be negative.
        embedding = self.vocab * self.hidden
        if self.params <= embedding and not self.tied_embeddings:
            raise ValueError(
                f"params: {self.params:g}; must be more than the {embedding:g} of the input embedding (vocab x hidden)"
            )
        return self

    @model_validator(mode="after")
    def _is_a_mixture_or_dense(self) -> Self:
        stated = {"experts_per_token": self.experts_per_token, "expert_ffn": self.expert_ffn}
        if self.experts is None:
            stated |= {"shared_ffn": self.shared_ffn, "expert_layers": self.expert_layers}
            others = [name for name, value in stated.items() if value is not None]
            if others:
                raise ValueError(f"{others[0]}: only for a mixture; state experts as well, or remove it")
            return self
        for name, value in stated.items():
            if value is None:
                raise ValueError(f"{name}: a mixture of {self.experts} experts needs it; state it, or remove experts")
        if (self.expert_layers or 0) > self.layers:
            raise ValueError(f"expert_layers: {self.expert_layers}; at most the {self.layers} layers")
        if self.expert_share > 1:
            raise ValueError(f"experts_per_token: {self.experts_per_token}; at most the {self.experts} experts")
        rest = self.params - self.expert_params
        if rest <= self.vocab * self.hidden * (1 if self.tied_embeddings else 2):
            raise ValueError(
                f"params: {self.params:g}; must be more than embeddings and the {self.expert_params:g} of all experts "
                f"({_GATED_MATRICES} x expert_layers x experts x hidden x expert_ffn)"
            )
        return self


def _with_default(value: float | dict[str, float]) -> float | dict[str, float]:
    if isinstance(value, dict) and "default" not in value:
        raise ValueError("needs the key 'default' for GPU types that are not listed")
    return value


class TrainTask(StrictModel):
    """Work on each sample other than generation: a forward pass, or training (three times that)."""

    name: Name
    kind: Literal["train", "infer"]
    scale: Positive = 1.0
    """Model size relative to the actor's."""
    epochs: Positive = 1.0
    shares_weights: bool = False
    """True if its weights are already in memory for another task."""
    is_service: bool = False
    """Computed by a service of its own, not by the training pool: log-probs of a frozen reference or teacher by scorers
    (`penstock serve scorer`); what is trained, and what shares its weights, by a critic (`penstock serve critic`)."""

    @property
    def is_critics(self) -> bool:
        """Whether a critic of its own computes it."""
        return self.is_service and (self.kind == "train" or self.shares_weights)


class RewardWork(StrictModel):
    """What a reward worker needs, and how long it takes to score a sample."""

    seconds_per_sample: Positive | dict[str, Positive]
    """One time for all machines, or by their GPU type with `default`."""
    at_once: Count = 1
    """Samples that a worker scores at once."""
    memory_GB: NotNegative = 0.0
    """Main memory of a worker."""
    gpu_memory_GB: NotNegative = 0.0
    """Of a GPU that each worker has to itself, for a reward model or judge; 0: workers take no GPU."""

    @field_validator("seconds_per_sample")
    @classmethod
    def _there_is_a_default(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        return _with_default(value)

    def samples_per_second(self, gpu: str) -> float:
        """Rate of one worker on a machine with GPUs of that type."""
        value = self.seconds_per_sample
        return self.at_once / (value.get(gpu, value["default"]) if isinstance(value, dict) else value)


class Workload(StrictModel):
    """The data that a training step consumes."""

    algorithm: str = ""
    """A label; `train_tasks` and `staleness` decide what is computed."""
    prompts_per_step: Count
    group_size: Count = 1
    """Responses per prompt."""
    prompt_len: Positive
    """Mean prompt length, tokens."""
    output_len: OutputLengths
    staleness: int = Field(ge=0, le=1_000_000)
    """Policy versions a sample may be behind when it is trained on; 0 is synchronous."""
    train_tasks: tuple[TrainTask, ...] = Field(min_length=1, max_length=64)
    reward: RewardWork | None = None
    """Scoring; unset: it never limits a plan, and the head's reward worker does it."""

    @property
    def pool_tasks(self) -> tuple[TrainTask, ...]:
        """What the training pool computes."""
        return tuple(task for task in self.train_tasks if not task.is_service)

    @property
    def scored_task(self) -> TrainTask | None:
        """What scorers compute; None if a plan needs none."""
        return next((task for task in self.train_tasks if task.is_service and not task.is_critics), None)

    @property
    def critic_tasks(self) -> tuple[TrainTask, ...]:
        """What a critic of its own computes; empty if a plan needs none."""
        return tuple(task for task in self.train_tasks if task.is_critics)

    @model_validator(mode="after")
    def _services_have_one_model_each(self) -> Self:
        services = len(self.train_tasks) - len(self.pool_tasks)
        trained = sum(task.kind == "train" for task in self.critic_tasks)
        if services - len(self.critic_tasks) > 1 or trained > 1 or not self.pool_tasks:
            raise ValueError(
                f"train_tasks: {services} of {len(self.train_tasks)} are services; a run has one model in scorers and "
                "one critic at most, and trains"
            )
        if self.critic_tasks and not trained:
            raise ValueError(
                f"train_tasks: {self.critic_tasks[0].name} shares the weights of a critic, and no service is trained; "
                "add that task (kind train), or leave out shares_weights or is_service"
            )
        return self


_MFU_TRAIN = {
    "default": 0.40,
    "H200": 0.42,
    "H100": 0.42,
    "H800": 0.43,
    "H20": 0.33,
    "A100-80": 0.55,
    "A100-40": 0.50,
    "L40S": 0.33,
    "L4": 0.35,
    "RTX4090": 0.45,
}
_MFU_INFER = {"default": 0.45, "H20": 0.40, "L4": 0.40}


class CostConstants(StrictModel):
    """Constants of the cost model; the defaults are RM-1's. Terms that RM-1 lacks are off by default."""

    eta_bw: Share = 0.75
    """Share of the memory bandwidth that decoding achieves."""
    eta_fl: Share = 0.60
    """Share of the arithmetic peak that decoding achieves."""
    eta_prefill: Share = 0.65
    mfu_train: Share | dict[str, Share] = _MFU_TRAIN
    """Share of the peak in training: one for all GPUs, or by GPU type with `default`."""
    mfu_infer: Share | dict[str, Share] = _MFU_INFER
    """Share of the peak in forward passes other than generation."""
    step_overhead_s: NotNegative = 0.002
    """Fixed time of each decode step."""
    layer_overhead_s: NotNegative = 0.0
    """Fixed time of each layer in a decode step: kernel start and end."""
    allreduce_overhead_s: NotNegative = 0.0
    """Time of each all-reduce in a decode step, two per layer, beyond its latency: launches, waiting for the last
    GPU."""
    sequence_overhead_s: NotNegative = 0.0
    """Time per sequence in a decode step: sampling, bookkeeping."""
    attention_efficiency: Share = 1.0
    """Rate of attention over the rate of matrix products, outside generation."""
    mem_util: Share = 0.9
    reserve_GB: NotNegative = 2.0
    """Memory of each GPU for everything but weights and cache."""
    max_num_seqs: Count = 1024
    """Maximum sequences that a replica decodes concurrently."""
    prefix_sharing: bool = True
    """Prefill and keep the prompt of a group once."""
    sync_pause_s: NotNegative = 1.0
    """Seconds for which a weight update pauses a replica."""
    kv_recompute_on_update: bool = False
    """An update drops the cache, which is then computed again."""
    dp_overlap: float = Field(default=0.8, ge=0, le=1)
    """Share of a step's computation that can hide its all-reduce."""
    train_overhead_s: NotNegative = 0.0
    """Fixed time of each training step."""
    train_bytes_per_param: Positive = 16.0
    train_pack_tokens: int = Field(default=0, ge=0, le=100_000_000)
    """Tokens of a trainer's forward pass. Memory and traffic are then those of Penstock's trainer: even shards over
    all GPUs of the pool, gathered weights and activations besides, gathers for every pass. 0: RM-1's rules."""

    @field_validator("mfu_train", "mfu_infer")
    @classmethod
    def _there_is_a_default(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        return _with_default(value)

    def mfu(self, gpu: str, kind: Literal["train", "infer"]) -> float:
        """Share of its peak that a GPU type reaches in a task of this kind."""
        value = self.mfu_train if kind == "train" else self.mfu_infer
        return value.get(gpu, value["default"]) if isinstance(value, dict) else value


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
    role: Literal["generator", "trainer"]
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel degree of the measurement; generators only."""
    pp: int = Field(default=1, ge=1)
    """Its pipeline stages; generators only."""
    tokens_per_second: Positive
    """Rate of completion tokens of a replica, or of trained tokens (prompt and completion) of one GPU."""


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
