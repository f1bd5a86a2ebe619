"""A critic with its optimiser, in one process or sharded over several: values, gradients, steps and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from penstock.storage.addresses import Address
from services.trainer.batches.packing import Pack, divide
from services.trainer.critic.config import CriticConfig, CriticProcesses, processes_of
from services.trainer.critic.critic_part import LOSS, NORM, CriticPart
from services.trainer.distributed.launch import end_process
from services.trainer.distributed.sharded_backend import ShardedBackend
from services.trainer.model.backend import Backend
from services.trainer.model.ranks import Ranks
from services.trainer.run_sections import OptimizerConfig


class ShardedCritic(ShardedBackend):
    """The calls of a `CriticPart`, made in all processes."""

    _local: CriticPart  # type: ignore[assignment]  # a Backend as far as a critic is called

    def configure(self, settings: dict[str, object]) -> None:
        """Every process sets its optimiser."""
        self._call(self._local.configure, settings=settings)

    def take_step(self, *, rate_factor: float, is_last: bool) -> None:
        """Every process steps its part."""
        self._call(self._local.take_step, rate_factor=rate_factor, is_last=is_last)


class TrainedCritic:
    """Computes what a critic in the trainer would, by the same code; one thread, which made it, at a time."""

    def __init__(self, config: CriticConfig, folder: Path, *, on_lost: Callable[[str], None] = end_process) -> None:
        """Begins as a copy of the model in `folder`; to be configured before its first step.

        Args:
            config: Of its process.
            folder: Of the model, on this machine.
            on_lost: Called with the reason when one of several processes is gone.

        Raises:
            UnsupportedModelError: Packed rows would not train the model on its own function.
            OSError, BackendError: The directory does not hold a model.
        """
        settings = processes_of(config, folder)
        self._critic = CriticPart(settings) if config.processes == 1 else _sharded(settings, on_lost=on_lost)
        self.vocab_size = self._critic.vocab_size
        self.max_sequence_length = self._critic.max_sequence_length

    def configure(self, optimizer: OptimizerConfig) -> None:
        """Later steps use these settings; the learning rate is the critic's peak."""
        self._critic.configure(optimizer.model_dump(mode="json"))

    def values(self, pack: Pack) -> npt.NDArray[np.float32]:
        """Values of the states before the pack's loss tokens, float32[N]."""
        return np.concatenate(self._critic.score(*self._shared_out(pack), quantity="values"))

    def accumulate(self, pack: Pack) -> tuple[float, float]:
        """Adds the gradient of a pack; returns the sum of its losses, and the norm of the mean gradient so far.

        Raises:
            NonFiniteLossError: Nothing was added.
        """
        totals = self._critic.forward_backward(*self._shared_out(pack))
        return totals.sums[LOSS], totals.maxima[NORM]

    def discard_gradients(self) -> None:
        """Discards the accumulated gradient."""
        self._critic.discard_gradients()

    def step(self, *, rate_factor: float, is_last: bool) -> None:
        """Takes the optimiser step on the gradient, whose norm is finite."""
        self._critic.take_step(rate_factor=rate_factor, is_last=is_last)

    def save(self, directory: Path) -> Future[None]:
        """Copies everything now and writes it in the background, as `Backend.save`."""
        return self._critic.save(directory)

    def load(self, source: Path | Address) -> None:
        """Continues from what `save` wrote; raises CheckpointMismatchError and then changes nothing."""
        self._critic.load(source)

    def close(self) -> None:
        """Ends the other processes, once what is being written is."""
        self._critic.close()

    def _shared_out(self, pack: Pack) -> Sequence[Pack | None]:
        """A pack for each process, of whole samples, in order."""
        num_parts = len(self._critic.shares)
        parts: list[Pack | None] = [*divide(pack, num_parts)]
        return parts + [None] * (num_parts - len(parts))


def _sharded(config: CriticProcesses, *, on_lost: Callable[[str], None]) -> ShardedCritic:
    # Imported here: a single process does not need it.
    from services.trainer.distributed.coordinator import lead

    found = lead(config, build=partial(part_of, config), torchrun=None, on_lost=on_lost, kind=ShardedCritic)
    return cast(ShardedCritic, found)


def part_of(critic: CriticProcesses, _config: object, ranks: Ranks | None) -> Backend:
    """One process' part; only the calls of a critic are made of it."""
    return cast(Backend, CriticPart(critic, ranks))
