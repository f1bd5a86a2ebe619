"""A critic of one number, without PyTorch, and packs and calls for it."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from penstock.storage.addresses import Address
from penstock.v1 import critic_pb2
from penstock.wire.codec import float32_bytes, int32_bytes
from services.trainer.batches.packing import Pack
from services.trainer.critic.critic_run import CriticRun
from services.trainer.model.backend import NonFiniteLossError
from services.trainer.run_sections import OptimizerConfig

POISON = 31
"""A token whose loss is not finite."""


class OneNumber:
    """A state's value is `weight` times its token; it learns by gradient descent on squared errors."""

    vocab_size, max_sequence_length = 32, 16

    def __init__(self) -> None:
        self.weight, self.num_steps = 0.0, 0
        self.discard_gradients()

    def configure(self, optimizer: OptimizerConfig) -> None:
        self._rate = optimizer.learning_rate

    def values(self, pack: Pack) -> np.ndarray:
        return (self.weight * pack.target_ids).astype(np.float32)

    def accumulate(self, pack: Pack) -> tuple[float, float]:
        if POISON in pack.token_ids:
            raise NonFiniteLossError("the critic's loss is nan")
        errors = self.values(pack) - pack.returns
        self._gradient += float((errors * pack.target_ids).sum())
        self._num_tokens += pack.num_loss_tokens
        return float((errors**2).sum() / 2), abs(self._gradient) / self._num_tokens

    def discard_gradients(self) -> None:
        self._gradient, self._num_tokens = 0.0, 0

    def step(self, *, rate_factor: float, is_last: bool) -> None:
        self.weight -= self._rate * rate_factor * self._gradient / max(1, self._num_tokens)
        self.num_steps += is_last
        self.discard_gradients()

    def close(self) -> None:
        pass

    def save(self, directory: Path) -> Future[None]:
        (directory / "weight").write_text(repr((self.weight, self.num_steps)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(self, source: Any) -> None:
        weight, num_steps = (source / "weight").read_text().strip("()").split(",")
        self.weight, self.num_steps = float(weight), int(num_steps)


def critic_packs(num: int, *, first_token: int = 3) -> list[critic_pb2.CriticPack]:
    """Packs of two samples of four tokens, each trained on its last two, every pack of other tokens."""
    return [
        critic_pb2.CriticPack(
            token_ids=int32_bytes([1, 2, first_token + index, 4, 1, 2, 5, 6]),
            segment_lengths=[4, 4],
            target_positions=int32_bytes([2, 3, 6, 7]),
            values=float32_bytes([0.0] * 4),
            returns=float32_bytes([1.0, 2.0, 3.0, 4.0]),
        )
        for index in range(num)
    ]


def opening(version: int = 0, minibatch: int = 0, *, epoch: int = 1, instance: str = "i", **fields: Any) -> Any:
    """OpenCritic of run r."""
    place = critic_pb2.CriticPlace(epoch=epoch, policy_version=version, minibatch=minibatch)
    settings = {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.99, "max_grad_norm": 1.0} | fields
    optimizer = critic_pb2.CriticOptimizer(**settings)
    return critic_pb2.OpenCriticRequest(run_id="r", place=place, instance_id=instance, optimizer=optimizer)


def make_critic(folder: Path, *, every: int = 2, stored: Address | None = None) -> CriticRun:
    """A critic of one number that keeps its state there, or in object storage."""
    return CriticRun(folder, make_model=OneNumber, checkpoint_every_steps=every, stored=stored)


def open_critic() -> CriticRun:
    """One that is open for run r at its beginning, in a folder of its own."""
    critic = make_critic(Path(tempfile.mkdtemp()))
    critic.open(opening())
    return critic
