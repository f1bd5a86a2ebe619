"""Settings of a generator process."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from penstock.collective.broadcast_backend import Transport
from penstock.config import PUBLIC_ADDRESS, LocalPath, MeasuredConfig, RunId, StrictModel, Targets
from penstock.targets import checked_address
from penstock.wire.sampling_rules import MIN_TEMPERATURE
from services.generator.emulation.config import EmulatedConfig
from services.generator.engines.base_config import ServedModel
from services.generator.engines.registry import DEFAULT_ENGINE, EngineConfig, check_recorder
from services.generator.environments.config import EnvironmentConfig

MAX_RELAY_PATIENCE_S = 60.0
MAX_INSTANCES = 256
"""Generators of one process."""


class InstanceConfig(StrictModel):
    """Emulated generators that share a process; unset fields take the process's own setting."""

    count: int = Field(default=1, ge=1, le=MAX_INSTANCES)
    """How many of this kind."""
    run_id: RunId | None = None
    """The run they work for."""
    site: str | None = None
    """Where they stand."""
    engine: EngineConfig | None = None
    """Their engine; `emulated`."""
    emulated: EmulatedConfig | None = None
    """The hardware they emulate."""


class OpenAISection(StrictModel):
    """The OpenAI-compatible endpoint, through which agents make trajectories."""

    listen: str | None = None
    """Its address, host:port; off when unset."""
    peers: tuple[Annotated[str, AfterValidator(checked_address)], ...] = Field(default=(), max_length=1024)
    """Addresses of the endpoints of all generators of the run, the same list for each and this one's among them: then
    agents may call any of them, and the sessions of a task reach one. Nothing is passed on when empty."""
    address: str | None = None
    """This endpoint's address among them; `listen` when unset."""
    model_name: str = Field(default="", max_length=256)
    """The model's name in requests; the name of its folder when empty."""
    group_size: int | None = Field(default=None, ge=1, le=1024)
    """Sessions of a task that are trained on together; the run's group size when unset."""
    reward: str | None = None
    """A reward server for sessions that are finished without a reward: host:port is the cluster's own, grpc://host:port
    a third party's, which is shown PENSTOCK_JUDGE_*."""
    max_sessions: int = Field(default=1024, ge=1, le=100_000)
    """Most sessions that are open or wait for their siblings; further ones are asked to retry."""
    session_idle_s: float = Field(default=600.0, gt=0, le=86_400)
    """A session without a request for this long is dropped."""
    group_timeout_s: float = Field(default=900.0, gt=0, le=86_400)
    """How long a finished session waits for its siblings; then its group is put without them."""
    request_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Longest time of one request, the wait for a slot included."""

    @model_validator(mode="after")
    def _is_one_of_its_peers(self) -> Self:
        own = self.address or self.listen
        if self.peers and own not in self.peers:
            raise ValueError(
                f"peers: {', '.join(self.peers)} do not hold this endpoint, {own}; add it, or say by `address` which "
                "one it is"
            )
        return self


class OpenAIConfig(OpenAISection):
    """The endpoint and what the run samples with."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=10)
    """Temperature of sessions, and of requests that name none: the run's sampling.temperature."""


class GeneratorConfig(MeasuredConfig, ServedModel):
    """A generator: leases prompts of one run, decodes them, swaps weights in flight."""

    listen: str = "127.0.0.1:7302"
    """Address of its GeneratorService, host:port."""
    generator_id: str = "gen-0"
    """Its name in status and logs, by default that of a certificate of roles; each start adds a suffix of its own."""
    site: str = Field(default="", max_length=128)
    """Its site; generators of one site relay weights to each other, those without a site do not."""
    run_id: RunId
    """The run it works for."""
    broker: Targets = "127.0.0.1:7301"
    """The broker, host:port; of a list of brokers on one Redis the first that works is used."""
    weights: Targets = "127.0.0.1:7304"
    """The weight store (the trainer), host:port; where it moves, a list of all places where it may be."""
    engine: EngineConfig = DEFAULT_ENGINE
    """The engine."""
    instances: tuple[InstanceConfig, ...] = ()
    """Several emulated generators in this process, each separate to the broker: number i listens at the port of
    `listen` + i and is named `generator_id`-i; empty is one."""
    flush_interval_s: float = Field(default=0.2, gt=0, le=10)
    """Longest time a decoded token waits before it is sent."""
    cache_dir: LocalPath
    """Folder for fetched weights; only the newest versions are kept."""
    relay_listen: str | None = None
    """Address of the HTTP server that relays weights to its site, host:port; unset: the host of `listen`, any free
    port."""
    relay_url: str | None = Field(default=None, pattern=PUBLIC_ADDRESS)
    """Address under which its site reaches that server: host:port (https if this process has a certificate), or the
    https:// address of a proxy; derived from the address it listens on when unset."""
    relay_patience_s: float = Field(default=0.0, ge=0, le=MAX_RELAY_PATIENCE_S)
    """How long another generator of the site may take to begin with a version before this one fetches it over the link
    itself; 0 for the generators of the machine that a plan has relay to its site. Revisions of a plan change it."""
    weights_transport: Transport = Transport.HTTP
    """Whether it takes part in the trainer's broadcasts, over gloo or nccl as the trainer is configured; only on the
    trainer's own fast network. Anything missed is fetched over HTTP."""
    compresses_fetches: bool = False
    """Whether the trainer compresses full weights; worthwhile if the link is slower than a core, 300 MB/s."""
    max_fetch_bytes_per_second: float | None = Field(default=None, gt=0)
    """Most bytes of weights fetched a second; no limit when unset."""
    max_relay_bytes_per_second: float | None = Field(default=None, gt=0)
    """Most bytes of weights relayed a second; no limit when unset."""
    openai: OpenAIConfig = OpenAIConfig()
    """The OpenAI-compatible endpoint; off unless it has an address."""
    environment: EnvironmentConfig | None = None
    """The environment that leased samples talk with, turn by turn; without one a sample is a single turn."""

    @model_validator(mode="after")
    def _only_emulated_engines_share_a_process(self) -> Self:
        if sum(instance.count for instance in self.instances) > MAX_INSTANCES:
            raise ValueError(f"instances: at most {MAX_INSTANCES} generators fit one process; start several")
        if self.instances and self.openai.listen is not None:
            raise ValueError("openai.listen: one address for one generator; leave instances out")
        for engine in (instance.engine or self.engine for instance in self.instances):
            if not engine.is_emulated:
                raise ValueError(f"instances: {engine.engine} engines need a process each; only emulated ones share")
        return self

    @model_validator(mode="after")
    def _can_record_routes(self) -> Self:
        for engine in (self.engine, *(instance.engine for instance in self.instances if instance.engine is not None)):
            if self.records_routes:
                check_recorder(engine, field="records_routes")
        return self
