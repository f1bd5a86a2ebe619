"""Settings of a reward process."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config import MeasuredConfig, RunId, StrictModel, Targets
from penstock.storage.addresses import StoredPath
from services.reward.canaries.config import CanariesConfig
from services.reward.code.config import CodeConfig
from services.reward.judge.config import JudgeConfig
from services.reward.models.config import FormatConfig, LengthConfig, NgramRepetitionConfig

NEED_ANSWERS = frozenset({"exact_match", "numeric", "math"})
"""Built-in rewards that compare with a row's reference answer."""
SANDBOXED = frozenset({"code", "reasoning_gym"})
"""Built-in rewards that run what a completion says, in the sandbox that `code` names."""
MAX_PARTS = 16


class ModelConfig(StrictModel):
    """What scores, and its own settings."""

    model: str = "exact_match"
    """A built-in name, `module:function`, or `grpc://host:port` of a RewardService."""
    candidate_limit: Literal["wrong", "drop"] = "wrong"
    """A completion whose own program exceeded its time, memory or output is worth 0 (with `code`: has failed that
    test), or its sample is dropped."""
    code: CodeConfig = Field(default_factory=CodeConfig)
    """Of the reward `code`."""
    judge: JudgeConfig | None = None
    """Of the reward `judge`, which needs them."""
    format: FormatConfig = FormatConfig()
    """Of the reward `format`."""
    length: LengthConfig | None = None
    """Of the reward `length`, which needs them."""
    ngram_repetition: NgramRepetitionConfig = NgramRepetitionConfig()
    """Of the reward `ngram_repetition`."""

    @model_validator(mode="after")
    def _length_says_how_long(self) -> Self:
        if self.model == "length" and self.length is None:
            raise ValueError("length: required by the reward length: max_tokens and buffer_tokens, or target_tokens")
        return self


class RewardPart(ModelConfig):
    """One part of a composite reward."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?$")
    """Its component's name; if empty, that of the built-in reward or of the function."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """What its value is multiplied by in the sum; 0 reports it only."""

    @property
    def component(self) -> str:
        """The name of its component."""
        return self.name or self.model.rpartition(":")[2]

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if not self.name and "://" in self.model:
            raise ValueError(f"name: required for {self.model}: what its component is called in metrics and recordings")
        return self


class RewardModelConfig(ModelConfig):
    """The reward model, and how patiently it is called. A string is its `model`, a list its `parts`."""

    parts: tuple[RewardPart, ...] = Field(default=(), max_length=MAX_PARTS)
    """In place of `model`: several models, whose weighted values add up."""
    timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Deadline of one batch, seconds."""
    max_retries: int = Field(default=3, ge=0, le=20)
    """Further attempts of what the reward model did not answer in time, or failed to judge."""
    max_error_share: float = Field(default=0.2, ge=0, le=1)
    """Above this share of the last 64 samples for which the grader itself failed (its sandbox or judge did not work, it
    raised, it did not answer in time), samples wait instead of being dropped."""
    max_batch_size: int = Field(default=32, ge=1, le=1024)
    """Most samples in one call of the reward model."""
    max_concurrent_batches: int = Field(default=4, ge=1, le=256)
    """Most calls under way at once."""
    canaries: CanariesConfig | None = None
    """Completions with known scores, by which a grader that drifts is noticed."""
    trusts_generator_text: bool = False
    """Score the text that generators send, unchecked, instead of decoding their token ids: for models without a
    tokenizer.json."""

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """What scores: the parts, or the one model."""
        return self.parts or (self,)

    @property
    def needs_answer(self) -> str:
        """The first reward that compares with a row's reference answer; empty if none does."""
        return next((each.model for each in self.models if each.model in NEED_ANSWERS), "")

    @property
    def calls_sandboxes(self) -> bool:
        """Whether programs or answers run elsewhere, by a service that is shown the caller's own credentials."""
        return any(each.model in SANDBOXED and each.code.sandbox == "remote" for each in self.models)

    @model_validator(mode="before")
    @classmethod
    def _a_string_is_the_model_and_a_list_the_parts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"model": value}
        if isinstance(value, list | tuple) and not value:
            raise ValueError("an empty list scores nothing; name a reward model")
        return {"parts": value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _parts_stand_alone(self) -> Self:
        if not self.parts:
            return self
        for name, field in ModelConfig.model_fields.items():
            if getattr(self, name) != field.get_default(call_default_factory=True):
                raise ValueError(f"{name}: has no effect beside parts; state it in the part that it is for")
        names = [part.component for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"parts: {names.count(name)} are called {name}; give each a name of its own")
        return self


class RewardConfig(MeasuredConfig):
    """A reward worker: leases finished samples of one run, scores them."""

    listen: str = "127.0.0.1:7303"
    """Address of its own RewardService, host:port."""
    run_id: RunId
    """The run it scores."""
    broker: Targets = "127.0.0.1:7301"
    """The broker, host:port; of a list of brokers on one Redis the first that works is used."""
    worker_id: str = "reward-0"
    """Its name in status and logs, by default that of a certificate of roles."""
    tokenizer_path: StoredPath | None = None
    """Hugging Face directory of the run's model, or its address: by tokenizer.json token ids become text."""
    reward: RewardModelConfig = RewardModelConfig()
    """The reward model."""
    sources: dict[str, RewardModelConfig] = Field(default_factory=dict, max_length=64)
    """In place of it, the reward models of some sources of the run's data, by the source's name."""

    @model_validator(mode="after")
    def _text_comes_from_somewhere(self) -> Self:
        if self.tokenizer_path is None and not self.reward.trusts_generator_text:
            raise ValueError(
                "tokenizer_path: required: the directory of the run's model, by whose tokenizer.json token ids become "
                "the text that is scored; or score what generators send, unchecked, with "
                "reward.trusts_generator_text=true"
            )
        return self
