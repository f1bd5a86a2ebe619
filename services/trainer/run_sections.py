"""The sections of a run's configuration that its trainer needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.config import LocalPath, StrictModel
from penstock.model.adapter_layout import MAX_RANK, MAX_TARGET_MODULES, MODULE_NAME
from penstock.names import RUN_ID_RULE, is_run_id
from penstock.staleness.registry import PolicyName
from penstock.storage.addresses import StoredAddress, StoredPath
from penstock.storage.fetched import fetched
from penstock.wire.sampling_rules import MIN_TEMPERATURE
from services.trainer.algorithms.config import AlgorithmConfig
from services.trainer.data_config import DataConfig
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
LEAST_LEASE_SILENCE_S = 300.0
"""How long a lease lasts at least without a token, unless the run states it."""
CRITIC_RATE_FACTOR, USUAL_CRITIC_RATE = 10.0, 1e-5
"""A critic learns by regression from a head of zeros and may go faster than a large policy at its 1e-6; 1e-5 is common.
A small policy's own rate is above that already: ten times the quick start's 4e-4 kept it from learning."""


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
    """Held-out prompts of each file measured at start and end, once sampled and once greedy; 0 measures none."""
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


def critic_rate(config: RunSections) -> float:
    """The peak learning rate of a run's critic."""
    policy = config.optimizer.learning_rate
    usual = max(policy, min(CRITIC_RATE_FACTOR * policy, USUAL_CRITIC_RATE))
    return config.algorithm.critic_learning_rate or usual
