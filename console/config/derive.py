"""Derives the configuration of each service from a run's configuration and its addresses: pure, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from console.config.config import RunConfig
from console.config.run_folder import RunFolder
from console.config.sections import TracingSection
from penstock.config import Document, StrictModel, validate
from penstock.rewards.score_messages import THIRD_PARTY
from penstock.storage.addresses import Address
from penstock.tracing.settings import (
    CERTIFICATE_VARIABLES,
    ENDPOINT_VARIABLES,
    FOLDER_VARIABLE,
    OFF_VARIABLE,
    PROTOCOL_VARIABLES,
    RATIO_VARIABLE,
    RUN_VARIABLE,
)
from services.broker.config import BrokerConfig
from services.generator.config import GeneratorConfig, OpenAIConfig
from services.generator.engines.registry import ENGINES
from services.generator.environments.config import EnvironmentConfig, EnvironmentLimits
from services.reward.config import RewardConfig
from services.scheduler.config import LengthsConfig, SchedulerConfig
from services.trainer.config import TrainerConfig, TrainingConfig
from services.trainer.critic.config import CriticConfig
from services.trainer.scorer.config import ScorerConfig

_ANY_HOST = {"0.0.0.0", "[::]", "::"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Addresses of a service."""

    target: str
    """host:port at which it is reached from this machine."""
    listen: str | None
    """host:port it is to listen on; None if it already runs elsewhere."""

    @property
    def is_local(self) -> bool:
        """Whether it is started here."""
        return self.listen is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Addresses of every service of a run."""

    broker: Endpoint
    scheduler: Endpoint
    reward: Endpoint
    trainer: Endpoint
    generators: tuple[Endpoint, ...]
    scorers: tuple[Endpoint, ...]
    critic: Endpoint | None
    """None if the trainer has it, or there is none."""
    environment: Endpoint | None
    """None without one."""
    weights_listen: str | None
    """Listen address of the weights server of a trainer started here; None if the trainer runs elsewhere."""
    weights_url: str | None
    """Address of that server as generators see it."""


def local_endpoint(listen: str) -> Endpoint:
    """A service that listens on `listen`; if that is all addresses, it is reached on loopback."""
    host, _, port = listen.rpartition(":")
    return Endpoint(target=f"127.0.0.1:{port}" if host in _ANY_HOST else listen, listen=listen)


def trace_environment(config: RunConfig, folder: RunFolder) -> dict[str, str]:
    """Variables that tell the services started here where their spans go."""
    found = export_environment(config.tracing, config.run.id)
    return found | ({FOLDER_VARIABLE: str(folder.path)} if config.tracing.enabled else {})


def export_environment(section: TracingSection, run_id: str) -> dict[str, str]:
    """The same for services elsewhere, which have no run folder to write to; no secrets are among them."""
    if not section.enabled:
        return {OFF_VARIABLE: "true"}
    collector = {
        ENDPOINT_VARIABLES[-1]: section.otlp_endpoint,
        PROTOCOL_VARIABLES[-1]: section.otlp_protocol,
        CERTIFICATE_VARIABLES[-1]: section.otlp_certificate,
    }
    stated = {name: value for name, value in collector.items() if value is not None}
    return {RATIO_VARIABLE: str(section.ratio), RUN_VARIABLE: run_id, **stated}


def broker_config(config: RunConfig, addresses: Addresses, redis_url: str) -> BrokerConfig:
    """The broker's configuration."""
    return BrokerConfig(
        insecure=config.insecure,
        listen=addresses.broker.listen or "",
        redis_url=redis_url,
        scheduler=addresses.scheduler.target,
    )


def scheduler_config(config: RunConfig, addresses: Addresses, folder: RunFolder) -> SchedulerConfig:
    """The scheduler's configuration."""
    return SchedulerConfig(
        insecure=config.insecure,
        listen=addresses.scheduler.listen or "",
        heartbeat_interval_s=config.scheduler.heartbeat_interval_s,
        cost_model=config.scheduler.cost_model,
        lengths=LengthsConfig(
            model_path=config.scheduler.length_model,
            pairs_file=config.scheduler.length_pairs,
            state_dir=folder.lengths,
        ),
    )


def reward_config(config: RunConfig, addresses: Addresses) -> RewardConfig:
    """The reward worker's configuration."""
    return RewardConfig(
        insecure=config.insecure,
        listen=addresses.reward.listen or "",
        run_id=config.run.id,
        broker=addresses.broker.target,
        tokenizer_path=config.model.path,
        reward=config.reward,
        sources=config.source_rewards,
    )


def scorer_config(config: RunConfig, addresses: Addresses, index: int) -> ScorerConfig:
    """The configuration of scorer `index`, counted from 0."""
    return ScorerConfig(
        insecure=config.insecure,
        listen=addresses.scorers[index].listen or "",
        run_id=config.run.id,
        broker=addresses.broker.target,
        worker_id=f"scorer-{index}",
        model_path=config.algorithm.reference_path or config.model.path,
        dtype=config.model.dtype,
        device=config.trainer.device,
        num_threads=config.trainer.num_threads,
        tokens_per_pack=config.trainer.tokens_per_pack,
    )


def critic_config(config: RunConfig, addresses: Addresses, folder: RunFolder) -> CriticConfig:
    """The configuration of a critic that is started here."""
    assert addresses.critic is not None
    return CriticConfig(
        insecure=config.insecure,
        listen=addresses.critic.listen or "",
        run_id=config.run.id,
        model_path=config.model.path,
        state_dir=folder.critic,
        checkpoint_every_steps=config.run.checkpoint_every_steps,
        dtype=config.model.dtype,
        device=config.trainer.device,
        processes=config.num_critic_processes,
        num_threads=config.trainer.num_threads,
        gradient_checkpointing=bool(config.trainer.gradient_checkpointing),
    )


def trainer_config(config: RunConfig, addresses: Addresses) -> TrainerConfig:
    """The trainer process's configuration."""
    return TrainerConfig(
        insecure=config.insecure,
        listen=addresses.trainer.listen or "",
        weights_listen=addresses.weights_listen or "",
        weights_url=addresses.weights_url,
        weights_transport=config.weights.transport,
        allowed_roots=trainer_roots(config),
        allowed_storage=trainer_storage(config),
        trusted_relay_hosts=config.weights.trusted_relay_hosts,
        # The console that started it resumes its run, and ends it when the console ends.
        state_dir=None,
    )


def trainer_roots(config: RunConfig) -> tuple[Path, ...]:
    """The paths that a trainer of this run reads and writes: clients may name no other path on its machine."""
    run = RunFolder(config.run.dir / config.run.id)
    # Links are followed: users put a run, or its checkpoints, on a larger disk.
    paths = (config.run.dir, run.path, run.checkpoints, config.model.path, *config.data.files.values())
    return tuple(path for path in paths if isinstance(path, Path))


def trainer_storage(config: RunConfig) -> tuple[Address, ...]:
    """The same for addresses in object storage."""
    sources = (config.model.path, *config.data.files.values(), config.run.checkpoint_storage)
    return tuple(source for source in sources if source is not None and not isinstance(source, Path))


def generator_config(config: RunConfig, addresses: Addresses, folder: RunFolder, index: int) -> GeneratorConfig:
    """The configuration of generator `index`, counted from 0."""
    section = config.generator
    kind = ENGINES[section.engine]
    engine = kind.model_validate(section.model_dump(include=set(kind.model_fields)))
    return GeneratorConfig(
        insecure=config.insecure,
        listen=addresses.generators[index].listen or "",
        generator_id=f"gen-{index}",
        site=config.site,
        run_id=config.run.id,
        broker=addresses.broker.target,
        weights=addresses.trainer.target,
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_lora_rank=None if config.lora is None else config.lora.rank,
        records_routes=config.algorithm.routing_replay,
        seed=config.run.seed + index,
        engine=engine,
        flush_interval_s=section.flush_interval_s,
        cache_dir=folder.cache / f"generator-{index}",
        weights_transport=config.weights.transport,
        openai=_openai_config(config, index),
        environment=_environment_config(config, addresses),
    )


def _environment_config(config: RunConfig, addresses: Addresses) -> EnvironmentConfig | None:
    if config.environment is None or addresses.environment is None:
        return None
    limits = config.environment.model_dump(include=set(EnvironmentLimits.model_fields))
    return EnvironmentConfig(target=THIRD_PARTY + addresses.environment.target, **limits)


def _openai_config(config: RunConfig, index: int) -> OpenAIConfig:
    # A composite is no server that endpoints could call.
    first, reward = config.generator.openai_listen, "" if config.reward.parts else config.reward.model
    host, _, port = (first or "").rpartition(":")
    listens = [] if first is None else [f"{host}:{int(port) + each}" for each in range(config.generator.count)]
    # They run on this machine, where they reach each other on loopback if they listen on all addresses.
    peers = [local_endpoint(listen).target for listen in listens]
    return OpenAIConfig(
        listen=None if first is None else listens[index],
        peers=tuple(peers) if len(peers) > 1 else (),
        address=peers[index] if len(peers) > 1 else None,
        reward=reward if reward.startswith(THIRD_PARTY) else None,
        temperature=config.sampling.temperature,
    )


def training_config(
    config: RunConfig,
    *,
    broker: str,
    source: str,
    critic: str | None = None,
    environment: Endpoint | None = None,
    trainer: Document | None = None,
) -> TrainingConfig:
    """The document of StartRun, with these keys of `trainer` instead if given.

    Raises ConfigError if the trainer would refuse it.
    """
    names = ("run", "model", "data", "sampling", "algorithm", "policy", "optimizer", "trainer")
    document = {name: getattr(config, name).model_dump() for name in names}
    document["trainer"] |= trainer or {}
    document["environment"] = None if environment is None else environment.target
    document["lora"] = None if config.lora is None else config.lora.model_dump()
    document["gap_groups_per_step"] = config.page.groups_per_step if config.record is False else None
    document["max_gap_bytes"] = config.page.max_sample_bytes
    document |= {"broker": broker} | ({} if critic is None else {"critic": critic})
    return validate(TrainingConfig, document, source=source)


def write_config(config: StrictModel, path: Path) -> None:
    """Save a service's configuration for `penstock serve --config`, readable by its owner only."""
    path.touch(mode=0o600)
    path.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
