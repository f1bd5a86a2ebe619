"""Defines the configuration of a whole run: `penstock run` reads it, prints it with --dry-run and saves it.

Sections that the trainer needs are the trainer's own models; the rest state what is started here and what elsewhere.
Nothing here opens a socket or reads a file other than the configuration: see `console.run.preflight` for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    create_model,
    field_validator,
    model_validator,
)

from console.config.data_section import with_absolute_canaries
from console.config.environment_section import EnvironmentSection, check_environment
from console.config.page_section import PageSection
from console.config.reward_settings import RewardDocument
from console.config.sections import (
    Address,
    BrokerSection,
    EndpointsSection,
    ListenSection,
    LogSection,
    SchedulerSection,
    TracingSection,
    WeightsSection,
)
from penstock.config import (
    ConfigError,
    Document,
    KnownKeys,
    NetworkConfig,
    StrictModel,
    apply_overrides,
    read_document,
    validate,
)
from penstock.reasoning_gym.source import reward_of
from penstock.targets import split_targets
from services.generator.engines.base_config import BaseEngineConfig
from services.generator.engines.registry import check_recorder, engine_keys, split_engine
from services.reward.config import RewardModelConfig
from services.trainer.parallel_config import ParallelConfig
from services.trainer.run_sections import RunSections

RECORDING_SUFFIXES = (".jsonl", ".parquet")
MAX_SAMPLES_PER_STEP = 1_000_000

_Section = TypeVar("_Section", bound=StrictModel)
DevicesOf = Literal["trainer", "generators", "reward", "scorers", "critic"]


class GeneratorSection(BaseEngineConfig):
    """The generators that are started here, and the keys of their engine."""

    count: int = Field(default=1, ge=0, le=256)
    """Generators started here; ignored if endpoints.generators is set. 0 for a replayed run."""
    flush_interval_s: float = Field(default=0.2, gt=0, le=10)
    """Longest time a decoded token waits before it is sent."""
    openai_listen: Address | None = None
    """Address of the OpenAI-compatible endpoint of the first generator, host:port; the others take the next ports."""


@cache
def _section_of(kind: type[BaseEngineConfig]) -> type[BaseEngineConfig]:
    return create_model(GeneratorSection.__name__, __base__=(kind, GeneratorSection))


def _read_section(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kind, document = split_engine(value)
    return _section_of(kind).model_validate(document)


AnyGeneratorSection = Annotated[
    SerializeAsAny[GeneratorSection],
    BeforeValidator(_read_section),
    KnownKeys(lambda: engine_keys() | GeneratorSection.model_fields.keys()),
]
"""The generator section with the keys of the engine that it names."""


class RunConfig(RunSections, NetworkConfig):
    """A whole run."""

    generator: AnyGeneratorSection = Field(default_factory=lambda: _read_section({}))
    """The generators."""
    reward: RewardModelConfig = RewardModelConfig()
    """The reward model; a plain string is its name, a list its parts, whose weighted values add up.
    reasoning_gym by default where data.train is a task of it."""
    rewards: int = Field(default=1, ge=0, le=1)
    """Reward workers that the run starts; 0 if others do, `penstock node` by the plan or `penstock serve reward`."""
    environment: EnvironmentSection | None = None
    """What samples talk with; a plain string is its target. The reward model then scores those samples of which the
    environment rewards no turn. Without it, a sample is one turn."""
    scorers: int = Field(default=1, ge=0, le=64)
    """Scorers that are started here for algorithm.reference service, with the trainer's device, threads and packs; 0 if
    all of them are elsewhere: they come by themselves."""
    broker: BrokerSection = BrokerSection()
    """The broker's store."""
    weights: WeightsSection = WeightsSection()
    """Transfer of weights."""
    scheduler: SchedulerSection = SchedulerSection()
    """The scheduler."""
    devices: dict[DevicesOf, Annotated[tuple[int | str, ...], Field(max_length=1024)]] = Field(default_factory=dict)
    """GPUs of processes started here: indices or UUIDs of nvidia-smi, GPU/INSTANCE for MIG. For the trainer one for
    each of trainer.processes, for generators tensor_parallel x pipeline_parallel each, in order; chosen if left out.
    For scorers one each; for the critic one, or several over which it is sharded. For reward none if left out. GPUs
    that are named for both are shared."""
    endpoints: EndpointsSection = EndpointsSection()
    """Services that run elsewhere."""
    listen: ListenSection = ListenSection()
    """Addresses of services started here."""
    log: LogSection = LogSection()
    """Logs."""
    tracing: TracingSection = TracingSection()
    """Traces."""
    page: PageSection = PageSection()
    """The page."""
    prices: dict[Annotated[str, Field(max_length=128)], Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """US dollars an hour of one GPU, by its type as planning problems name it (H100, A100-80, L4), for what the page
    says of costs; `machine` is the price of this machine where the run computes on none. A problem states its own."""
    site: str = Field(default="", max_length=128)
    """Site of this machine; generators that are started here fetch one copy of each version and relay it to each other,
    which pays if the trainer is elsewhere. If empty, each fetches its own."""
    record: bool | Path = False
    """Record the trained samples: true for trajectories.jsonl in the run folder, or a .jsonl or .parquet file."""
    record_max_bytes: int | None = Field(default=None, ge=1024 * 1024)
    """Size at which the recording continues in another file (trajectories-00002.jsonl ...); null keeps one file."""

    @field_validator("record")
    @classmethod
    def _is_a_recording(cls, value: bool | Path) -> bool | Path:
        if isinstance(value, Path) and value.suffix not in RECORDING_SUFFIXES:
            raise ValueError(f"must be true, false, or a file that ends in {' or '.join(RECORDING_SUFFIXES)}")
        return value

    @property
    def source_rewards(self) -> dict[str, RewardModelConfig]:
        """Rewards of sources that have their own, by the source's name."""
        stated = {each.name: each.reward for each in (*self.data.train_sources, *self.data.eval_sources)}
        return {
            name: validate(RewardDocument, {"reward": value}, source=f"data: source {name!r}").reward
            for name, value in stated.items()
            if value is not None
        }

    @model_validator(mode="after")
    def _rewards_of_sources_can_be_read(self) -> Self:
        try:
            rewards = self.source_rewards
        except ConfigError as error:
            raise ValueError(str(error)) from error
        for name, reward in rewards.items():
            if reward.trusts_generator_text != self.reward.trusts_generator_text:
                raise ValueError(
                    f"data: source {name!r}: reward.trusts_generator_text: texts are decoded for all sources alike; "
                    "set it in the run's reward"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _tasks_bring_their_scorer(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(data := given.get("data"), Mapping):
            return given
        reward = reward_of(data.get("train"), given.get("reward", {}))
        return {**given, "reward": reward} if reward else given

    @field_validator("environment", mode="before")
    @classmethod
    def _a_string_names_the_environment(cls, value: Any) -> Any:
        return {"target": value} if isinstance(value, str) else value

    @property
    def starts_generators(self) -> bool:
        """Whether this run starts generators itself, `generator.count` of them."""
        return self.endpoints.generators is None and self.scheduler.problem is None

    @property
    def starts_reward(self) -> bool:
        """Whether the run starts a reward worker."""
        return self.rewards > 0 and self.endpoints.reward is None

    @property
    def num_scorers(self) -> int:
        """Scorers that this run starts."""
        return self.scorers if self.algorithm.has_scorer else 0

    @property
    def starts_critic(self) -> bool:
        """Whether this run starts a critic of its own."""
        return self.algorithm.has_critic_service and self.endpoints.critic is None

    @property
    def num_critic_processes(self) -> int:
        """Processes of a critic that is started here: one for each of its GPUs."""
        return len(self.devices.get("critic", ())) or 1

    @model_validator(mode="after")
    def _the_critic_is_within_reach(self) -> Self:
        if self.starts_critic and self.endpoints.trainer is not None:
            raise ValueError(
                "endpoints.critic: required with algorithm.critic service where endpoints.trainer is set: start "
                "`penstock serve critic` where that trainer reaches it, and name its address"
            )
        if self.endpoints.critic is not None and not self.algorithm.has_critic_service:
            raise ValueError(
                "endpoints.critic: has no effect without algorithm.critic service; set that, or leave it out"
            )
        is_moved = "," in (self.endpoints.critic or "")
        if is_moved and (self.scheduler.problem is None or self.run.checkpoint_storage is None):
            raise ValueError(
                "endpoints.critic: names several places, between which a plan moves the critic by object storage; set "
                "scheduler.problem and run.checkpoint_storage, or name one"
            )
        return self

    @model_validator(mode="after")
    def _a_plan_is_followed_whole(self) -> Self:
        problem = self.scheduler.problem
        if problem is None and (self.scheduler.nodes or self.scheduler.plan is not None):
            key = "nodes" if self.scheduler.nodes else "plan"
            raise ValueError(f"scheduler.{key}: has no effect without scheduler.problem; name that as well")
        if problem is not None and self.endpoints.generators is not None:
            raise ValueError("endpoints.generators: the plan of scheduler.problem places the generators; leave one out")
        if problem is not None and not self.run.id:
            raise ValueError("run.id: required with scheduler.problem: machines serve one run by its id")
        return self

    @property
    def moves_trainer(self) -> bool:
        """Whether the plan places the trainer, at one of several addresses, and revisions move it."""
        return self.endpoints.trainer is not None and len(split_targets(self.endpoints.trainer)) > 1

    @model_validator(mode="after")
    def _the_trainer_can_move(self) -> Self:
        if not self.moves_trainer:
            return self
        if self.scheduler.problem is None:
            raise ValueError(
                f"endpoints.trainer: {self.endpoints.trainer} are several addresses, between which only a plan can "
                "move the trainer; name one, or set scheduler.problem"
            )
        if self.trainer.parallel != ParallelConfig():
            raise ValueError(
                "trainer.parallel: the plan sets the trainer's mesh where endpoints.trainer names several machines; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _step_is_not_absurd(self) -> Self:
        num_samples = self.algorithm.prompts_per_step * self.algorithm.group_size
        if num_samples > MAX_SAMPLES_PER_STEP:
            raise ValueError(
                f"algorithm: prompts_per_step x group_size is {num_samples} samples a step; "
                f"at most {MAX_SAMPLES_PER_STEP} are allowed"
            )
        return self

    @model_validator(mode="after")
    def _samples_fit_the_engine(self) -> Self:
        most = self.generator.max_context_tokens
        needed = self.data.max_prompt_tokens + self.sampling.max_new_tokens
        if most is not None and needed > most:
            raise ValueError(
                f"generator.max_context_tokens: {most} is less than data.max_prompt_tokens + sampling.max_new_tokens "
                f"= {needed}; raise it, or lower one of the two"
            )
        return self

    @model_validator(mode="after")
    def _engine_records_routes(self) -> Self:
        if self.algorithm.routing_replay and self.starts_generators:
            check_recorder(self.generator, field="algorithm.routing_replay")
        return self

    @model_validator(mode="after")
    def _the_environment_is_in_reach(self) -> Self:
        if self.environment is not None:
            check_environment(
                self.environment,
                lease_silence_s=self.trainer.max_lease_silence_s,
                # Who asks it from other machines.
                far="generators" if not self.starts_generators else "a trainer" if self.endpoints.trainer else "",
                is_exposed=self.listen.environment is not None,
            )
        return self

    @model_validator(mode="after")
    def _agents_need_no_scorer(self) -> Self:
        if self.algorithm.has_scorer and self.generator.openai_listen is not None:
            raise ValueError(
                "generator.openai_listen: scorers do not work for groups that agents put; leave it out, or set "
                "algorithm.reference to trainer"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_has_data(self) -> Self:
        if self.run.eval_every_steps > 0 and not self.data.eval_sources:
            raise ValueError(
                "run.eval_every_steps: has no effect without data.eval; name held-out rows, or set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_has_generators(self) -> Self:
        if self.generator.count == 0 and self.starts_generators and self.data.eval_sources:
            raise ValueError(
                "generator.count: 0 leaves no generator to decode the rows of data.eval, which is measured before and "
                "after training; write data.eval=null"
            )
        return self

    @model_validator(mode="after")
    def _remote_services_know_the_run(self) -> Self:
        attached = ("reward", "critic", "generators")
        found = [name for name in attached if getattr(self.endpoints, name) is not None]
        if found and not self.run.id:
            raise ValueError(f"run.id: required with endpoints.{found[0]}, which serves one run by its id")
        return self


def load_run_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Load a YAML file with dotted overrides applied. Raises ConfigError, one line per problem."""
    return parse_run_config(apply_overrides(read_document(path), overrides), source=str(path))


def parse_run_config(document: Document, *, source: str) -> RunConfig:
    """Check `document` as a RunConfig. Raises ConfigError, one line per problem, each prefixed with `source`."""
    return validate(RunConfig, document, source=source)


def resolve(config: RunConfig, *, now_s: float) -> RunConfig:
    """`config` with a run id, and with this machine's paths made absolute.

    Absolute, because a run can be resumed from any folder; a remote trainer's paths are left unchanged.
    """
    run_id = config.run.id or time.strftime("run-%Y%m%d-%H%M%S", time.gmtime(now_s))
    scheduler = _absolute(config.scheduler, "problem", "plan")
    nodes = tuple(path.expanduser().absolute() for path in scheduler.nodes)
    sections: dict[str, StrictModel] = {
        "run": config.run.model_copy(update={"id": run_id}),
        "scheduler": scheduler.model_copy(update={"nodes": nodes}),
    }
    data = config.data
    if config.endpoints.trainer is None or config.moves_trainer:
        data = data.absolute()
        sections |= {"run": _absolute(sections["run"], "dir"), "model": _absolute(config.model, "path")}
    # Rewards are started here, wherever the trainer is, and so are scorers.
    sections["data"] = with_absolute_canaries(data)
    if (canaries := config.reward.canaries) is not None:
        sections["reward"] = config.reward.model_copy(update={"canaries": _absolute(canaries, "path")})
    sections["algorithm"] = _absolute(config.algorithm, "reference_path")
    return _absolute(config, "record").model_copy(update=sections)


def to_yaml(config: RunConfig) -> str:
    """The configuration as YAML; `load_run_config` reads it back to the same value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=False)


def _absolute(section: _Section, *names: str) -> _Section:
    """The section with the paths of these names, where it states them, made absolute."""
    paths = {name: path for name in names if isinstance(path := getattr(section, name), Path)}
    return section.model_copy(update={name: path.expanduser().absolute() for name, path in paths.items()})
