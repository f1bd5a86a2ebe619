"""Builders of trainer values, and a backend that computes nothing."""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from penstock.storage.addresses import Address
from penstock.storage.fetched import fetched
from penstock.storage.storage import FileDigest
from services.trainer.batches.packing import Pack, Trajectory
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.model.backend import (
    Backend,
    LossTotals,
    NonFiniteGradientError,
    NonFiniteLossError,
    Quantity,
    StepMetrics,
)
from services.trainer.publishing.written_weights import WrittenWeights

VOCAB_SIZE = 40


def build_trajectory(rng: np.random.Generator, *, num_prompt: int, num_completion: int) -> Trajectory:
    total = num_prompt + num_completion
    return Trajectory(
        token_ids=rng.integers(0, VOCAB_SIZE, total).astype(np.int32),
        loss_mask=np.arange(total) >= num_prompt,
        behavior_logprobs=-rng.random(total).astype(np.float32) * 4,
        advantages=rng.normal(size=total).astype(np.float32),
    )


def build_sample(
    *,
    group_id: str = "g0",
    index: int = 0,
    reward: float | None = 1.0,
    num_tokens: int = 4,
    version: int = 0,
    **changes: object,
) -> TrainingSample:
    values: dict[str, object] = {
        "prompt_token_ids": np.array([1, 2, 3], dtype=np.int32),
        "completion_token_ids": ((np.arange(num_tokens) + 7 * index) % VOCAB_SIZE).astype(np.int32),
        "behavior_logprobs": np.full(num_tokens, -1.5, dtype=np.float32),
        "policy_versions": np.full(num_tokens, version, dtype=np.int64),
    }
    return TrainingSample(group_id=group_id, sample_index=index, reward=reward, **{**values, **changes})


def build_group(group_id: str, rewards: list[float | None], *, num_tokens: int = 4) -> list[TrainingSample]:
    return [
        build_sample(group_id=group_id, index=index, reward=reward, num_tokens=num_tokens + index)
        for index, reward in enumerate(rewards)
    ]


def save_tiny_qwen2(directory: Path, *, seed: int = 0, **changes: object) -> Path:
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(Qwen2Config(**{**settings, **changes})).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"stands": "in"}', encoding="utf-8")
    return directory


def scores_of(backend: Backend, pack: Pack, quantity: Quantity = "logprobs") -> np.ndarray:
    """Of a pack's loss tokens, as the step asks for them; in several processes by one of them."""
    return backend.score(pack, *[None] * (len(backend.shares) - 1), quantity=quantity)[0]


class RecordingBackend:
    """Remembers what it was asked; a pack holding `poison_token` has a loss that is not finite."""

    vocab_size = VOCAB_SIZE
    max_sequence_length = 32
    adapter = None
    shares = (1.0,)
    is_spread = False

    def __init__(self, *, poison_token: int | None = None, gradient: float = 1.0) -> None:
        self.packs: list[Pack] = []
        self.steps: list[int] = []
        self.num_discards = 0
        self.num_refreshes = 0
        self._poison_token = poison_token
        self._gradient = gradient

    def forward_backward(self, *packs: Pack | None) -> LossTotals:
        (pack,) = packs
        assert pack is not None
        if self._poison_token is not None and self._poison_token in pack.target_ids:
            raise NonFiniteLossError("the loss is nan")
        self.packs.append(pack)
        return LossTotals(
            num_tokens=pack.num_loss_tokens,
            sums={"loss": 2.0 * pack.num_loss_tokens},
            logprobs=((pack.behavior_logprobs - pack.target_ids / 100).astype(np.float32),),
        )

    def score(self, *packs: Pack | None, quantity: Quantity) -> list[np.ndarray]:
        nothing = np.empty(0, dtype=np.float32)
        return [nothing if pack is None else self.score_of(pack, quantity).astype(np.float32) for pack in packs]

    def score_of(self, pack: Pack, quantity: Quantity) -> np.ndarray:
        """Every state is worth a hundredth of its token, every log-ratio to the reference is a thousandth of it."""
        tokens = pack.target_ids.astype(np.float32)
        return {"logprobs": tokens * 0, "reference_logprobs": -tokens / 1000, "values": tokens / 100}[quantity]

    def refresh_reference(self) -> None:
        self.num_refreshes += 1

    def optimizer_step(self, *, divisor: int, is_last: bool = True) -> StepMetrics:
        if not math.isfinite(self._gradient):
            raise NonFiniteGradientError("the gradient is nan")
        self.steps.append(divisor)
        return StepMetrics(grad_norm=self._gradient, learning_rate=0.1, num_batches=len(self.steps))

    def discard_gradients(self) -> None:
        self.num_discards += 1

    def close(self) -> None:
        pass

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def write_weights(self, path: Path) -> Future[WrittenWeights]:
        raise NotImplementedError

    def save(self, directory: Path) -> Future[None]:
        (directory / "model.safetensors").write_bytes(b"weights")
        written: Future[None] = Future()
        written.set_result(None)
        return written

    def upload(self, directory: Path, address: Address) -> Future[dict[str, FileDigest]]:
        uploaded: Future[dict[str, FileDigest]] = Future()
        uploaded.set_result({})
        return uploaded

    def load(self, source: Path | Address) -> None:
        folder = source if isinstance(source, Path) else fetched("run.checkpoint_storage", source)
        self.loaded = (folder / "model.safetensors").read_bytes()
