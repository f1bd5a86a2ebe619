"""Settings of a reward process."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from penstock.config import MeasuredConfig, RunId, StrictModel, Targets
from penstock.storage.addresses import StoredPath
from services.reward.code.config import CodeConfig


class RewardModelConfig(StrictModel):
    """The reward model, and how patiently it is called."""

    model: str = "exact_match"
    """A built-in name, `module:function`, or `grpc://host:port` of a RewardService."""
    timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Deadline of one batch, seconds."""
    max_retries: int = Field(default=3, ge=0, le=20)
    """Further attempts of a batch whose reward model was away or too slow."""
    max_error_share: float = Field(default=0.2, ge=0, le=1)
    """Above this share of the last 64 samples for which the grader itself failed (sandbox, judge), samples wait."""
    max_batch_size: int = Field(default=32, ge=1, le=1024)
    """Most samples in one call of the reward model."""
    max_concurrent_batches: int = Field(default=4, ge=1, le=256)
    """Most calls under way at once."""
    code: CodeConfig = Field(default_factory=CodeConfig)
    """Of the reward `code`."""
    trusts_generator_text: bool = False
    """Score the text that generators send, unchecked, instead of decoding their token ids: for models without a
    tokenizer.json."""


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

    @model_validator(mode="after")
    def _text_comes_from_somewhere(self) -> Self:
        if self.tokenizer_path is None and not self.reward.trusts_generator_text:
            raise ValueError(
                "tokenizer_path: required: the directory of the run's model, by whose tokenizer.json token ids become "
                "the text that is scored; or score what generators send, unchecked, with "
                "reward.trusts_generator_text=true"
            )
        return self
