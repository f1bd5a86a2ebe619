"""Sections of a run's configuration that say where its services are, and how they log and trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.collective.broadcast_backend import Transport
from penstock.config import StrictModel, Targets
from penstock.security.registered_addresses import checked_trusted_hosts
from penstock.targets import checked_address, checked_addresses
from penstock.tracing.settings import DEFAULT_RATIO, GRPC, checked_endpoint
from services.broker.storage.redis.address import parse_redis_url
from services.scheduler.config import CostModelName

Address = Annotated[str, AfterValidator(checked_address)]
"""One server, host:port."""


class BrokerSection(StrictModel):
    """The broker's store."""

    redis_url: str | None = None
    """Redis that stores the run's state, in any form that a broker accepts; null starts one in the run folder."""

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_redis_url(value)
        return value


class WeightsSection(StrictModel):
    """How weights are transferred from the trainer to generators that are started here."""

    transport: Transport = Transport.HTTP
    """http, or broadcasts between CPUs (gloo) or GPUs (nccl), with HTTP for anything they do not deliver."""
    trusted_relay_hosts: Annotated[tuple[str, ...], AfterValidator(checked_trusted_hosts)] = ()
    """Hosts that remote generators may name as relays although they call the trainer started here from another address,
    as behind NAT: names, .domain, addresses, networks."""


class SchedulerSection(StrictModel):
    """The scheduler."""

    heartbeat_interval_s: float = Field(default=5.0, gt=0, le=300)
    """How often machines report; three missed reports make a machine count as gone."""
    problem: Path | None = None
    """Planning problem (docs/planning.md) whose plan the run follows: machines that run `penstock node` start and stop
    generators by it; this run starts none."""
    plan: Path | None = None
    """Initial plan, as `penstock plan --json` prints or `--deploy` writes it: it places the trainers, and
    the generators unless the scheduler finds better places. Everything is planned if null."""
    cost_model: CostModelName = "rm1"
    """Cost model of the plan, as in `penstock plan --cost-model`."""
    nodes: tuple[Path, ...] = ()
    """Configurations of machines for each of which this run starts a `penstock node`."""
    length_model: Path | None = None
    """Folder of a small Hugging Face model that is fine-tuned to forecast lengths; if null, ridge regression only."""
    length_pairs: Path | None = None
    """Initial prompts and lengths as JSON lines, for example the recording of an earlier run."""


class EndpointsSection(StrictModel):
    """Services that already run elsewhere, as host:port; null means the service is started here."""

    broker: Annotated[Targets, AfterValidator(checked_addresses)] | None = None
    """A broker, or a list of brokers on one Redis, of which the first that works is used."""
    scheduler: Address | None = None
    """A scheduler."""
    reward: Address | None = None
    """A reward worker started for this run's id (a reward model's address belongs in reward.model)."""
    trainer: Annotated[Targets, AfterValidator(checked_addresses)] | None = None
    """A trainer; the paths in model and data are then on its machine. Several with scheduler.problem: the plan says at
    which of them `penstock node` starts the trainer, with a process for each GPU that trains, and revisions move it;
    all of them need the run folder, model and data at the same paths."""
    critic: Annotated[Targets, AfterValidator(checked_addresses)] | None = None
    """A critic started for this run's id, for algorithm.critic service; required where the trainer is elsewhere. One
    that is started here has the trainer's device and threads, and keeps its state in the run folder. Several with
    scheduler.problem: the plan says at which of them `penstock node` starts the critic, and revisions move it."""
    generators: list[str] | None = None
    """Generators started for this run's id, which must answer before it starts; [] if none can be reached from this
    machine: those register with the broker on their own."""

    @field_validator("generators")
    @classmethod
    def _are_addresses(cls, value: list[str] | None) -> list[str] | None:
        return None if value is None else [checked_address(item) for item in value]


class ListenSection(StrictModel):
    """Addresses of services that are started here, as host:port; if null, a free port of 127.0.0.1."""

    broker: Address | None = None
    """The broker."""
    scheduler: Address | None = None
    """The scheduler."""
    reward: Address | None = None
    """The reward worker."""
    trainer: Address | None = None
    """The trainer."""
    weights: Address | None = None
    """The trainer's HTTP server for weights."""
    environment: Address | None = None
    """The environment, where environment names a class; generators and a trainer on other machines reach it there."""
    public_host: str | None = None
    """Name or address under which generators on other machines fetch weights, and reach the environment, here;
    127.0.0.1 if null."""


class LogSection(StrictModel):
    """Logs of the services, in the run folder's logs/."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity written."""
    format: Literal["text", "json"] = "text"
    """Format of a line."""


class TracingSection(StrictModel):
    """Spans of what the services do, in the run folder's traces.jsonl (docs/tracing.md)."""

    enabled: bool = True
    """Whether spans are recorded."""
    ratio: float = Field(default=DEFAULT_RATIO, ge=0, le=1)
    """Share of groups whose samples are traced one by one, chosen at their submission; slow and failed ones come on
    top."""
    otlp_endpoint: str | None = None
    """Collector to which spans are also exported, http://HOST:PORT or https://HOST:PORT of OTLP; null leaves that to
    OTEL_EXPORTER_OTLP_ENDPOINT. What it is to be shown belongs into OTEL_EXPORTER_OTLP_HEADERS."""
    otlp_protocol: Literal["grpc", "http/protobuf"] | None = None
    """Protocol of that collector; its address may then have a path for http/protobuf. Null leaves that to
    OTEL_EXPORTER_OTLP_PROTOCOL, and without it to grpc."""
    otlp_certificate: str | None = None
    """File with the authority of that collector's certificate, where the services run; null leaves that to
    OTEL_EXPORTER_OTLP_CERTIFICATE, and without it to the system's authorities."""

    @model_validator(mode="after")
    def _endpoint_is_one(self) -> Self:
        if self.otlp_endpoint is not None:
            try:
                checked_endpoint(self.otlp_endpoint, protocol=self.otlp_protocol or GRPC)
            except ValueError as error:
                raise ValueError(f"otlp_endpoint: {error}") from error
        return self
