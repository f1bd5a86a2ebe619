"""Defines the training step's interface to the model: the `Backend` protocol, its values and its errors.

BackendError
+-- UnsupportedModelError      the model cannot be trained on packed rows
+-- CheckpointMismatchError    a checkpoint does not fit the model
+-- CheckpointUnavailableError a process could not fetch a checkpoint
+-- PartialStepError           some optimiser steps of a batch were taken, the next one failed
+-- NonFiniteError             numbers are not finite; the policy is unchanged
    +-- NonFiniteLossError     a loss is NaN or infinite; nothing was accumulated from that pack
    +-- NonFiniteGradientError the accumulated gradient is; no step was taken, the gradient is gone
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from penstock.storage.addresses import Address
from penstock.storage.storage import FileDigest
from penstock.v1.weights_pb2 import AdapterInfo
from services.trainer.batches.packing import Pack
from services.trainer.publishing.written_weights import WrittenWeights

if TYPE_CHECKING:
    from torch import Tensor


MAX_NAMED_GROUPS = 8
Quantity = Literal["logprobs", "reference_logprobs", "values"]
"""What a pass without gradient computes for each loss token: its log-prob in nats, under the current weights or under
the reference, or the critic's value of the state in which it was sampled."""


class BackendError(Exception):
    """Base of a backend's errors."""


class UnsupportedModelError(BackendError):
    """The model cannot be trained on packed rows; the message says what is missing."""


class CheckpointMismatchError(BackendError):
    """A checkpoint does not hold the tensors of this model, or holds them in other shapes."""


class CheckpointUnavailableError(BackendError):
    """A checkpoint in object storage did not reach every process."""


class PartialStepError(BackendError):
    """The weights are those between two optimiser steps of a batch: no version, and no point to continue from."""


class NonFiniteError(BackendError):
    """A number is NaN or infinite.

    Args:
        message: Names the number.
        group_ids: Sample groups that may be at fault, if the raising code knows them.
    """

    reason: ClassVar[str]
    """Reason recorded by the broker's counters and the metrics."""

    def __init__(self, message: str, group_ids: Iterable[str] = ()) -> None:
        self.group_ids = tuple(dict.fromkeys(group_ids))
        names = ", ".join(self.group_ids[:MAX_NAMED_GROUPS])
        if len(self.group_ids) > MAX_NAMED_GROUPS:
            names += f" and {len(self.group_ids) - MAX_NAMED_GROUPS} more"
        super().__init__(f"{message}; the samples are of groups {names}" if names else message)


class NonFiniteLossError(NonFiniteError):
    """The loss of a pack is NaN or infinite; its gradient was not added."""

    reason = "non_finite_loss"


class NonFiniteGradientError(NonFiniteError):
    """The accumulated gradient is NaN or infinite; the weights were not changed and the gradient was dropped."""

    reason = "non_finite_gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotals:
    """The values that a loss reported, summed over packs."""

    num_tokens: int = 0
    """Loss tokens."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums over those tokens."""
    maxima: Mapping[str, float] = field(default_factory=dict)
    """Maxima over those tokens."""
    logprobs: tuple[npt.NDArray[np.float32], ...] = field(default=(), compare=False)
    """Of each pack with loss tokens, in order: their log-probs under the weights of the pass, nats, float32[N]."""

    def merged(self, other: LossTotals) -> LossTotals:
        """The totals of both."""
        return LossTotals(
            num_tokens=self.num_tokens + other.num_tokens,
            sums={k: self.sums.get(k, 0.0) + other.sums.get(k, 0.0) for k in {**self.sums, **other.sums}},
            maxima={
                k: max(self.maxima.get(k, -math.inf), other.maxima.get(k, -math.inf))
                for k in {**self.maxima, **other.maxima}
            },
            logprobs=self.logprobs + other.logprobs,
        )

    def means(self) -> dict[str, float]:
        """Sums divided by the number of tokens, and maxima as they are; empty without tokens."""
        if self.num_tokens == 0:
            return {}
        return {**{k: v / self.num_tokens for k, v in self.sums.items()}, **self.maxima}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimiser step."""

    grad_norm: float
    """L2 norm of the whole gradient, divided as the algorithm divides it, before clipping."""
    learning_rate: float
    """The learning rate of the step."""
    num_batches: int
    """Batches completed since the initial model, including this one."""


class StepBackend(Protocol):
    """What a step needs of a `Backend`."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""

    @property
    def max_sequence_length(self) -> int:
        """Maximum number of tokens in one trajectory."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Relative capacity of each process, in any unit; one number for one process."""

    def forward_backward(self, *packs: Pack | None) -> LossTotals:
        """Adds the gradient of the summed loss of one pack for each process, in the order of `shares`.

        Raises:
            NonFiniteLossError: nothing was added; discard the gradients or continue without these packs.
        """

    def score(self, *packs: Pack | None, quantity: Quantity) -> list[npt.NDArray[np.float32]]:
        """One pass without gradient over one pack for each process; float32[N] for each, empty if it is None.

        Raises:
            ValueError: No reference is kept, or there is no critic.
        """

    def optimizer_step(self, *, divisor: int, is_last: bool = True) -> StepMetrics:
        """Divides the gradient by `divisor`, clips its norm, steps and clears it.

        With nothing accumulated this is a step with a zero gradient, as for a batch whose advantages are all zero.

        Args:
            divisor: of the whole step (`algorithms.base.divisor`), at least 1, skipped zero-advantage samples included.
            is_last: of its batch; the learning rate's schedule counts batches.

        Raises:
            NonFiniteGradientError: no step was taken.
        """

    def discard_gradients(self) -> None:
        """Discards the accumulated gradient."""


class Backend(StepBackend, Protocol):
    """Holds a causal language model and its optimiser, in one process or in several that train together.

    Promises:
    - Gradients add up over `forward_backward` until `optimizer_step` or `discard_gradients`; the order of packs and
      how trajectories are split over packs changes them by rounding only.
    - A raised error leaves the weights and the optimiser as they were.
    - After `load(d)`, the same calls give bit-identical results to those made after `save(d)`, on the same machine
      with the same number of threads.
    - Calls are synchronous and not thread-safe: one thread at a time.
    """

    @property
    def adapter(self) -> AdapterInfo | None:
        """How `state_tensors` are applied if they are a LoRA adapter; None if they are all weights."""

    @property
    def is_spread(self) -> bool:
        """Whether some of its processes do not see the run's folder: no checkpoint there is whole."""

    def refresh_reference(self) -> None:
        """Makes the current weights the reference, if one is kept.

        Raises:
            UnsupportedModelError: The reference can only be the initial model.
        """

    def close(self) -> None:
        """Releases other processes, which end; the last call."""

    def state_tensors(self) -> dict[str, Tensor]:
        """The trained weights by their Hugging Face names, tied ones once, or an adapter's by those of PEFT.

        Live views or copies, valid until the next step or load.
        """

    def write_weights(self, path: Path) -> Future[WrittenWeights]:
        """Copies what `state_tensors` names now, and writes it to a safetensors file in the background.

        Every process copies, writes and digests its own part; nothing is gathered. The future ends when the file is
        complete under its name; it raises OSError if a disk refuses. One at a time.

        Args:
            path: In the run's folder. What processes hold that do not see it is sent to the first one.
        """

    def save(self, directory: Path) -> Future[None]:
        """Copies everything now and writes it in the background; the future ends when it is written.

        The result is a Hugging Face model directory of safetensors, configuration and tokenizer (for an adapter, the
        directory that PEFT reads), with a `resume/` folder from which training continues: weights, optimiser, random
        state and step count, loadable by any number of processes. The future raises OSError if the disk refuses.

        Args:
            directory: Exists and is empty, in the run's folder. A process that does not see it keeps its part of
                `resume/` beside it on its own disk, until that is uploaded.
        """

    def upload(self, directory: Path, address: Address) -> Future[dict[str, FileDigest]]:
        """Copies what the processes wrote of `resume/` in the newest `save` to object storage, in the background.

        The future has the files that are there, by name; it raises ConfigError or OSError if one of them is not.

        Args:
            directory: Where the checkpoint lies now.
            address: Of the checkpoint.
        """

    def load(self, source: Path | Address) -> None:
        """Continues from what `save` wrote.

        Args:
            source: Its folder, which every process sees, or its address in object storage.

        Raises:
            CheckpointMismatchError: names, shapes or element types differ; nothing was changed.
            CheckpointUnavailableError: A process could not fetch it; nothing was changed.
        """
