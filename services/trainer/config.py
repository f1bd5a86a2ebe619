"""Settings of a trainer process, and of the run it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.collective.broadcast_backend import Transport
from penstock.config import PUBLIC_ADDRESS, LocalPath, MeasuredConfig, Targets
from penstock.security.registered_addresses import checked_trusted_hosts
from penstock.storage.addresses import StoredAddress
from penstock.targets import checked_addresses
from penstock.wire.pieces import MAX_CRITIC_PACK_TOKENS, MAX_GROUP_TOKENS
from services.trainer.algorithms.config import AlgorithmConfig
from services.trainer.algorithms.registry import ALGORITHMS
from services.trainer.data_config import TrainSource
from services.trainer.run_sections import MAX_SAMPLES_PER_GROUP, RunSections


class TrainerConfig(MeasuredConfig):
    """Where a trainer process listens; its work comes with StartRun."""

    listen: str = "127.0.0.1:7304"
    """Address of its TrainerService and WeightStoreService, host:port."""
    weights_listen: str = "127.0.0.1:7305"
    """Address of the HTTP server that hands out weights, host:port."""
    weights_url: str | None = Field(default=None, pattern=PUBLIC_ADDRESS)
    """Where generators reach that server: host:port (https if this process has a certificate), or the https:// address
    of a proxy; <weights_listen> when unset."""
    trusted_relay_hosts: Annotated[tuple[str, ...], AfterValidator(checked_trusted_hosts)] = ()
    """Hosts that generators may name as relays although they call from another address and show no certificate for
    them, as behind NAT: a name, all names below one (.site.example), an address or a network (10.0.0.0/8)."""
    max_weights_bytes_per_second: float | None = Field(default=None, gt=0)
    """Maximum bytes of weights that server sends per second, to all receivers together; no limit when unset."""
    weights_transport: Transport = Transport.HTTP
    """Whether weights are broadcast to generators with the same setting on this machine's own fast network: gloo
    between processors, nccl between GPUs. Neither is encrypted."""
    broadcast_listen: str | None = None
    """Address at which members of a broadcast find each other, host:port; unset: the host of `weights_listen`, any free
    port."""
    broadcast_gather_s: float = Field(default=2.0, gt=0, le=15)
    """Maximum time that a broadcast waits for expected generators."""
    broadcast_stall_s: float = Field(default=10.0, gt=0, le=600)
    """A broadcast without progress for this long is abandoned; missing parts are fetched over HTTP."""
    trusts_network: bool = False
    """Let processes that torchrun started on several machines talk to each other, and broadcast weights to other
    machines, although torch.distributed neither encrypts nor authenticates while TLS protects everything else."""
    state_dir: Path | None = Path("runs/.trainers")
    """Folder in which the current run is kept, so that a trainer restarted on the same port continues it automatically;
    with null, or a port chosen by the system, it waits for StartRun."""
    allowed_roots: Annotated[tuple[Path, ...], Field(min_length=1)] = (Path(),)
    """Folders, or files, below which the run folders, models and data of StartRun must lie, with links resolved;
    defaults to the folder in which the trainer is started."""
    runs_dir: LocalPath | None = None
    """Folder of run folders on this machine in place of `run.dir` of StartRun, which it then does not share with other
    trainers of the run: it goes on from `run.checkpoint_storage`, which the run must have."""
    allowed_storage: tuple[StoredAddress, ...] = ()
    """Addresses in object storage (s3://BUCKET/FOLDER) below which those of StartRun must lie: this process reads and
    writes there with credentials of its own."""


def _check_reference(algorithm: AlgorithmConfig) -> None:
    is_apart = algorithm.reference == "service"
    if is_apart and algorithm.kl_coefficient == 0:
        raise ValueError(
            "algorithm.reference: service has no effect without algorithm.kl_coefficient; set that as well"
        )
    if is_apart and algorithm.reference_refresh_steps:
        raise ValueError(
            "algorithm.reference_refresh_steps: a scorer's model is frozen; set it to 0, or algorithm.reference to "
            "trainer"
        )
    if algorithm.definition.needs_teacher and algorithm.reference_path is None:
        raise ValueError(
            f"algorithm.reference_path: {algorithm.name} learns from a teacher; name its Hugging Face directory, and "
            "set algorithm.reference to service"
        )
    if not is_apart and algorithm.reference_path is not None:
        raise ValueError(
            f"algorithm.reference_path: {algorithm.reference_path}: the trainer's reference is model.path; set "
            "algorithm.reference to service as well"
        )


class TrainingConfig(RunSections):
    """Everything a trainer needs for one run: the document of StartRun."""

    broker: Targets = "127.0.0.1:7301"
    """The broker, host:port; in a list of brokers on one Redis the first that works is used."""

    critic: Targets = "127.0.0.1:7309"
    """The critic, host:port, with algorithm.critic service; of one that a plan moves, all places where it may be."""

    environment: Targets | None = None
    """The environment that samples talk with, host:port: what it says of itself decides how prompts are rendered."""

    @field_validator("environment")
    @classmethod
    def _is_a_host_and_port(cls, value: str | None) -> str | None:
        return None if value is None else checked_addresses(value)

    @field_validator("broker", "critic")
    @classmethod
    def _are_hosts_and_ports(cls, value: str) -> str:
        # Clients choose them, and gRPC would also call a socket of this machine or ask a name server of their choice.
        return checked_addresses(value)

    gap_groups_per_step: Annotated[int, Field(ge=0)] | None = 0
    """Groups of each step whose tokens' log-prob gaps are kept in logprob_gaps.jsonl of the run folder; null keeps
    those of all."""
    max_gap_bytes: int = Field(default=32 * 1024 * 1024, ge=1024 * 1024)
    """Most bytes of that file; at that size every second one of its older steps goes."""

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        algorithm = self.algorithm
        if algorithm.max_staleness > 0 and algorithm.correction == "none" and not algorithm.allow_uncorrected:
            raise ValueError(
                "algorithm.correction: 'none' is refused with max_staleness > 0, where samples come from older "
                "versions; choose truncated, masked or decoupled, set max_staleness to 0, or say allow_uncorrected"
            )
        if algorithm.definition.needs_kl and algorithm.kl_coefficient == 0:
            raise ValueError(
                f"algorithm.kl_coefficient: {algorithm.name} needs a KL; set it, for example to "
                f"{1.0 if algorithm.definition.needs_teacher else 0.01}"
            )
        if algorithm.reference_refresh_steps and algorithm.kl_coefficient == 0:
            raise ValueError("algorithm.reference_refresh_steps: without kl_coefficient there is no reference")
        if algorithm.reference_refresh_steps and self.lora is not None:
            raise ValueError(
                "algorithm.reference_refresh_steps: with lora the reference is the model itself; leave it 0"
            )
        _check_reference(algorithm)
        definition = algorithm.definition
        if algorithm.turn_discount is not None and (definition.step_advantages or definition.is_off_policy):
            raise ValueError(
                f"algorithm.turn_discount: {algorithm.name} needs whole samples; leave it out, or choose another "
                "algorithm.name"
            )
        if algorithm.num_minibatches > algorithm.prompts_per_step:
            raise ValueError(
                f"algorithm.num_minibatches: {algorithm.num_minibatches} is more than "
                f"algorithm.prompts_per_step ({algorithm.prompts_per_step}); lower it"
            )
        if algorithm.num_replayed_groups and not algorithm.definition.is_off_policy:
            others = ", ".join(name for name, each in ALGORITHMS.items() if each.is_off_policy)
            raise ValueError(
                f"algorithm.num_replayed_groups: {algorithm.name} trains once on a sample; choose {others} or 0"
            )
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        algorithm = self.algorithm
        if algorithm.critic == "service" and not algorithm.definition.has_critic:
            raise ValueError(
                f"algorithm.critic: service, but {algorithm.name} has no critic; leave it out, or set algorithm.name "
                "to ppo"
            )
        longest = max(self.trainer.tokens_per_pack, self.data.max_prompt_tokens + self.sampling.max_new_tokens)
        if algorithm.has_critic_service and longest > MAX_CRITIC_PACK_TOKENS:
            raise ValueError(
                f"algorithm.critic: a critic of its own takes packs of at most {MAX_CRITIC_PACK_TOKENS} tokens, and "
                f"trainer.tokens_per_pack or the longest sample is {longest}; lower them, or set it to trainer"
            )
        return self

    @model_validator(mode="after")
    def _check_stages_and_splits(self) -> Self:
        if self.lora is None:
            return self
        for name in ("pipeline", "tensor") if self.algorithm.has_trainer_critic else ():
            if (degree := getattr(self.trainer.parallel, name)) > 1:
                raise ValueError(
                    f"trainer.parallel.{name}: {degree} is not supported with lora beside the critic of "
                    f"{self.algorithm.name}; leave it 1, use shard"
                )
        return self

    @property
    def offload_obstacle(self) -> str | None:
        """What of this run does not go together with `trainer.offload`, with what to do; None if all of it does."""
        trainer, parallel = self.trainer, self.trainer.parallel
        obstacles = {
            "one process, whose weights FSDP does not shard; raise trainer.processes": len(trainer.shares) == 1,
            "trainer.device cpu, where there is nothing to move": trainer.device == "cpu",
            "lora": self.lora is not None,
            f"the critic of {self.algorithm.name}": self.algorithm.has_trainer_critic,
            "trainer.parallel.pipeline": parallel.pipeline > 1,
            "trainer.parallel.tensor": parallel.tensor > 1,
            "trainer.parallel.expert": parallel.expert > 1,
            "trainer.parallel.islands": parallel.islands is not None,
        }
        return next((name for name, is_there in obstacles.items() if is_there), None)

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.trainer.offload and (obstacle := self.offload_obstacle):
            raise ValueError(f"trainer.offload: true is not supported with {obstacle}; or leave trainer.offload unset")
        return self

    @model_validator(mode="after")
    def _can_replay_routes(self) -> Self:
        for name in ("pipeline", "tensor", "expert"):
            degree = getattr(self.trainer.parallel, name)
            if self.algorithm.routing_replay and degree > 1:
                raise ValueError(
                    f"algorithm.routing_replay: true is not supported with trainer.parallel.{name} {degree}; set it to "
                    "false, or use shard, replicate or islands"
                )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        for source in self.data.train_sources:
            self._check_source(source)
        most = self.sampling.max_new_tokens
        for each in (*self.data.train_sources, *self.data.eval_sources):
            if each.max_new_tokens is not None and each.max_new_tokens > most:
                raise ValueError(
                    f"data: source {each.name!r}: max_new_tokens: {each.max_new_tokens} is more than "
                    f"sampling.max_new_tokens ({most}), the run's longest; lower it, or raise that"
                )
        if self.data.needs_accuracy and not (self.run.eval_every_steps and self.run.num_eval_prompts):
            raise ValueError(
                "data.curriculum: until_accuracy needs measurements; set run.eval_every_steps and run.num_eval_prompts"
            )
        if self.data.difficulty is not None and self.policy.drops_zero_variance:
            raise ValueError(
                "data.difficulty: policy.drops_zero_variance drops the very groups that all pass or all fail before "
                "they are counted; leave one of the two out"
            )
        return self

    def _check_source(self, source: TrainSource) -> None:
        algorithm, key = self.algorithm, f"data.train: source {source.name!r}"
        size, longest = source.group_size, source.max_new_tokens
        if size is not None and size > algorithm.group_size:
            raise ValueError(
                f"{key}: group_size: {size} is more than algorithm.group_size ({algorithm.group_size}), the run's "
                "largest; lower it, or raise that"
            )
        if size == 1 and (algorithm.definition.needs_siblings or self.policy.drops_zero_variance):
            raise ValueError(
                f"{key}: group_size: 1 leaves {algorithm.name} nothing to compare a sample with; set 2 or more"
            )
        if longest is not None and algorithm.overlong_buffer_tokens > longest:
            raise ValueError(
                f"{key}: max_new_tokens: {longest} is less than algorithm.overlong_buffer_tokens "
                f"({algorithm.overlong_buffer_tokens}); raise it, or lower that"
            )

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        algorithm = self.algorithm
        if algorithm.overlong_buffer_tokens > self.sampling.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens: {algorithm.overlong_buffer_tokens} is more than "
                f"sampling.max_new_tokens ({self.sampling.max_new_tokens}); lower it"
            )
        if algorithm.group_size == 1 and (algorithm.definition.needs_siblings or self.policy.drops_zero_variance):
            raise ValueError(
                f"algorithm.group_size: 1 leaves {algorithm.name} nothing to compare a sample with; set 2 or "
                "more, or algorithm.name to ppo without policy.drops_zero_variance"
            )
        if algorithm.has_scorer and self.data.train is None:
            raise ValueError(
                "data.train: null is a run of groups that others put, for which no scorer works; name rows, or set "
                "algorithm.reference to trainer"
            )
        if algorithm.definition.needs_teacher and self.policy.drops_zero_variance:
            raise ValueError(
                f"policy.drops_zero_variance: {algorithm.name} also learns from groups of equal rewards; set it to "
                "false"
            )
        num_samples = algorithm.group_size + self.policy.num_extra_samples
        if num_samples > MAX_SAMPLES_PER_GROUP:
            raise ValueError(
                f"policy.num_extra_samples: makes groups of {num_samples} samples with algorithm.group_size; "
                f"at most {MAX_SAMPLES_PER_GROUP} are allowed"
            )
        num_tokens = algorithm.group_size * self.sampling.max_new_tokens
        if num_tokens > MAX_GROUP_TOKENS:
            raise ValueError(
                f"sampling.max_new_tokens: groups of {algorithm.group_size} samples (algorithm.group_size) of "
                f"{self.sampling.max_new_tokens} tokens are {num_tokens} tokens, and at most {MAX_GROUP_TOKENS} can be "
                "delivered at once; lower one of the two"
            )
        return self
