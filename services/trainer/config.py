"""Settings of a trainer process, and of the run it is given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.collective.broadcast_backend import Transport
from penstock.config import PUBLIC_ADDRESS, LocalPath, MeasuredConfig, StrictModel, Targets
from penstock.model.adapter_layout import MAX_RANK, MAX_TARGET_MODULES, MODULE_NAME
from penstock.names import RUN_ID_RULE, is_run_id
from penstock.security.addresses import checked_trusted_hosts
from penstock.staleness.registry import PolicyName
from penstock.storage.addresses import StoredAddress, StoredPath
from penstock.storage.fetched import fetched
from penstock.targets import checked_addresses
from penstock.wire.pieces import MAX_GROUP_TOKENS
from penstock.wire.sampling_rules import MIN_TEMPERATURE
from services.trainer.algorithms.config import AlgorithmConfig
from services.trainer.algorithms.registry import ALGORITHMS
from services.trainer.parallel_config import ParallelConfig

MAX_SAMPLES_PER_GROUP = 1024
TrackerName = Literal["tensorboard", "wandb", "wandb_offline"]
TRACKER_PACKAGES: dict[TrackerName, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "wandb_offline": "wandb"}
"""The package that each tracker needs; none comes with Penstock (requirements/trackers.txt)."""

UNTRAINABLE: Mapping[str, tuple[object, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}
"""Sampling options that training refuses, each with its neutral values."""
Share = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


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
    allowed_storage: tuple[StoredAddress, ...] = ()
    """Addresses in object storage (s3://BUCKET/FOLDER) below which those of StartRun must lie: this process reads and
    writes there with credentials of its own."""


class RunSettings(StrictModel):
    """General settings of the run."""

    id: str = ""
    """Names the run; derived from the time when empty."""
    dir: LocalPath = Path("runs")
    """Folder in which the run's own folder is created."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of data order, sampling and training."""
    num_steps: int = Field(default=100, ge=1)
    """Optimiser steps."""
    num_eval_prompts: int = Field(default=256, ge=0, le=100_000)
    """Held-out prompts measured at start and end, once sampled and once greedy; 0 measures none."""
    eval_every_steps: int = Field(default=0, ge=0)
    """Steps between further measurements, made while training continues; 0 measures at start and end only."""
    checkpoint_every_steps: int = Field(default=20, ge=1)
    """Steps between checkpoints; one is written at the end in any case."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; older ones are deleted."""
    checkpoint_storage: StoredAddress | None = None
    """Address in object storage (s3://, gs://, file://) to which every checkpoint is copied, below the run's id, and
    from which a run is resumed where its folder has none as new. Trainers on several machines need no shared disk
    then."""
    patience_s: float | None = Field(default=None, ge=0)
    """How long to wait for a broker or trainer that is away before the run fails; forever when unset."""
    trackers: tuple[TrackerName, ...] = ()
    """Where numbers go besides metrics.jsonl: tensorboard, wandb, wandb_offline; each needs its package."""

    @field_validator("id")
    @classmethod
    def _names_a_run(cls, value: str) -> str:
        if value and not is_run_id(value):
            raise ValueError(f"must be {RUN_ID_RULE}")
        return value


class ModelConfig(StrictModel):
    """The policy."""

    path: StoredPath
    """Hugging Face directory of a causal language model and its tokenizer, or its address: s3://, gs://, file://."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of matrix products in training, and of published weights; auto is bfloat16 on GPUs for a model of 16
    bits, else float32. Trained weights are float32 in any case."""

    @property
    def folder(self) -> Path:
        """The directory on this machine, fetched at the first use if it has an address; raises as `fetched` does."""
        return fetched("model.path", self.path, "model")


class LoraSection(StrictModel):
    """A LoRA adapter is trained, published and saved; the model itself does not change."""

    base: Literal["auto", "nf4"] = "auto"
    """How the trainer holds the model: auto in the type of matrix products (`model.dtype`), nf4 its linear layers in 4
    bits (QLoRA). Generators sample with the model as it is, so with nf4 log-probs differ by the rounding."""
    rank: int = Field(default=16, ge=1, le=MAX_RANK)
    """Rank of every adapted layer."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the adapter's contribution is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Last parts of the names of the linear layers that are adapted."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapter's input while gradients are computed. Above 0 the loss sees noisier log-probs than those
    of the published policy."""

    @field_validator("target_modules")
    @classmethod
    def _are_inner_layers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(value) > MAX_TARGET_MODULES or not all(MODULE_NAME.fullmatch(name) for name in value):
            raise ValueError("name at least one layer by the last part of its name, for example q_proj")
        if {"lm_head", "embed_tokens"} & set(value):
            raise ValueError("the embedding and the output head cannot be adapted; name layers between them")
        return value


class DataConfig(StrictModel):
    """Prompts: JSONL or parquet with `prompt` (question, problem) and `answer` (label, ground_truth, solution)."""

    train: StoredPath | None
    """Training rows: a file or its address; null for a run whose groups come from others: agents, a replay."""
    eval: StoredPath | None = None
    """Held-out rows; when unset, nothing is measured."""
    shuffle: bool = True
    """Whether each pass over the data uses a new order."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Rows with longer prompts are skipped, counted and reported."""

    @property
    def train_file(self) -> Path | None:
        """Training rows on this machine, fetched at the first use if they have an address; raises as `fetched` does."""
        return None if self.train is None else fetched("data.train", self.train)

    @property
    def eval_file(self) -> Path | None:
        """Likewise of held-out rows."""
        return None if self.eval is None else fetched("data.eval", self.eval)


class SamplingConfig(StrictModel):
    """How completions are sampled for training."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=10)
    """Softmax temperature."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum number of completion tokens."""

    @model_validator(mode="before")
    @classmethod
    def _from_the_whole_distribution(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, neutral in UNTRAINABLE.items():
            if name in given and given[name] not in neutral:
                raise ValueError(
                    f"{name}: {given[name]!r} would sample from another distribution than the whole softmax at "
                    f"sampling.temperature, whose log-probs the trainer computes; leave {name} out"
                )
        return {name: value for name, value in given.items() if name not in UNTRAINABLE}


class SamplePolicyConfig(StrictModel):
    """How the broker treats the run's samples."""

    stale: PolicyName = "wait"
    """Samples that would lag more than algorithm.max_staleness: wait holds them back, and the trainer waits for slow
    ones; drop waits for none and restarts them; continue lets the trainer wait and restarts late samples."""
    partial_groups: Literal["wait", "drop", "shrink"] = "shrink"
    """Groups that lost a sample: wait for a replacement, drop the group, or shrink it."""
    drops_zero_variance: bool = False
    """Drop groups whose rewards are all equal, and train on other groups instead (dynamic sampling, DAPO)."""
    num_extra_samples: int = Field(default=0, ge=0, le=1022)
    """Samples drawn beyond algorithm.group_size; the first to be scored form the group, the others are aborted."""
    num_retained_steps: int = Field(default=64, ge=1, le=1024)
    """Steps whose samples are kept after training, for resuming and export."""
    max_retained_bytes: int = Field(default=4 * 1024**3, ge=1024**2, le=2**50)
    """Bytes of samples and prompts that the run may have in the broker's store: half for steps after training, of which
    the newest is always kept; half for samples that wait or are under way, beyond which new work waits once a step is
    out."""
    dispatch: Literal["fifo", "least_loaded", "lpt", "streamrl", "auto"] = "auto"
    """Which samples go to which generator, and in which order."""
    token_shards: int = Field(default=1, ge=1, le=1024)
    """Shards over which the tokens of samples under way are spread, for runs that need more than one broker process or
    Redis node; about four for each broker. 1 keeps them with the run."""


class OptimizerConfig(StrictModel):
    """AdamW."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps, from the first, over which the rate falls linearly to a tenth of its peak; 0 keeps it constant."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the first and of the second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""


class ComputeConfig(StrictModel):
    """How the trainer uses its machine."""

    num_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of PyTorch."""
    tokens_per_pack: int = Field(default=1024, ge=16)
    """Token budget of one packed forward pass; a longer sample gets a pack of its own."""
    max_groups_per_microbatch: int = Field(default=8, ge=1)
    """Maximum number of groups taken from the broker at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    processes: Annotated[int, Field(ge=1, le=1024)] | Annotated[tuple[Share, ...], Field(min_length=1)] = 1
    """Number of processes over which model and optimiser are sharded (FSDP2), one per GPU, started on the trainer's
    machine or by torchrun on many; or, if devices differ, the share of tokens of each process, in any unit: [1, 2]."""
    parallel: ParallelConfig = ParallelConfig()
    """How the processes divide the work."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about a third more work. Unset: if they would not fit
    otherwise."""
    offload: bool | None = None
    """Keep weights, gradients and optimiser in the machine's memory, and take AdamW's step there: less of a GPU's
    memory, slower steps. Unset: if they would not fit otherwise, and fit there."""
    max_silence_s: float | None = Field(default=None, gt=0)
    """The run fails if no new group arrives for this long while the broker is reachable. Unset: 1800 s, or three times
    the duration of the longest completion on the slowest generator if that is longer."""
    max_evaluation_silence_s: float | None = Field(default=None, gt=0)
    """The same for an evaluation's results; unset: 900 s or more."""
    max_lease_silence_s: float | None = Field(default=None, ge=1, le=604_800)
    """A lease ends if no token arrives for this long, even if its generator renews it; unset: 300 s or more."""
    max_skips_in_a_row: int = Field(default=0, ge=0, le=1000)
    """A step whose loss or gradient is not finite restarts without the groups that may be at fault, which are dropped,
    at most this often in a row; then the run stops. 0 stops it at once."""

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each process."""
        return (1.0,) * self.processes if isinstance(self.processes, int) else self.processes

    @model_validator(mode="after")
    def _mesh_has_all_processes(self) -> Self:
        self.parallel.mesh(len(self.shares))
        for ranks in self.parallel.together(len(self.shares)):
            if len(set(shares := [self.shares[rank] for rank in ranks])) > 1:
                who, fix = "the stages of one pipeline", ", and give a slow process fewer layers by layers_per_stage"
                if self.parallel.tensor > 1:
                    who, fix = "processes that split layers between them", ""
                raise ValueError(f"processes: {shares} are {who}, which have one share; make them equal{fix}")
        return self


class RunSections(StrictModel):
    """The sections of a run that its trainer needs; the configuration of a whole run has them, too."""

    run: RunSettings = RunSettings()
    """The run itself."""
    model: ModelConfig
    """The policy."""
    lora: LoraSection | None = None
    """Train a LoRA adapter on the model; null trains all weights."""
    data: DataConfig
    """Prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling for training."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The training objective."""
    policy: SamplePolicyConfig = SamplePolicyConfig()
    """How samples are treated."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimiser."""
    trainer: ComputeConfig = ComputeConfig()
    """How the trainer uses its machine."""


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

    @field_validator("broker")
    @classmethod
    def _are_hosts_and_ports(cls, value: str) -> str:
        # Clients choose it, and gRPC would also call a socket of this machine or ask a name server of their choice.
        return checked_addresses(value)

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
    def _check_stages_and_splits(self) -> Self:
        if self.lora is None:
            return self
        refused = {"expert": "lora"}
        if self.algorithm.definition.has_critic:
            refused |= dict.fromkeys(("pipeline", "tensor"), f"lora beside the critic of {self.algorithm.name}")
        for name, other in refused.items():
            if (degree := getattr(self.trainer.parallel, name)) > 1:
                raise ValueError(
                    f"trainer.parallel.{name}: {degree} is not supported with {other}; leave it 1, use shard"
                )
        if self.lora.base == "nf4" and self.trainer.parallel.tensor > 1:
            raise ValueError(
                f"trainer.parallel.tensor: {self.trainer.parallel.tensor} is not supported with lora.base nf4, which "
                "packs whole rows; leave it 1, use shard"
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
            f"the critic of {self.algorithm.name}": self.algorithm.definition.has_critic,
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
