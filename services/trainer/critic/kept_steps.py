"""What a critic keeps of its past: checkpoints, and the optimiser steps since the oldest of them.

Invariants:
- Every position between the trainer's oldest checkpoint and the newest step can be reached, bit for bit on the same
  machine with as many threads; what is older is deleted.
- Steps are taken again with the settings with which they were taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog

from penstock.config import ConfigError, validate
from penstock.errors import InvalidFieldError, VersionConflictError
from penstock.v1 import critic_pb2
from services.trainer.batches.critic_packs import decoded_pack
from services.trainer.batches.packing import Pack
from services.trainer.checkpoints.checkpoint import Saved
from services.trainer.critic.journal import Journal, Position
from services.trainer.critic.kept_checkpoints import KeptCheckpoints
from services.trainer.critic.metrics import REPEATED_STEPS
from services.trainer.critic.state_folder import StateFolder
from services.trainer.run_sections import OptimizerConfig

_log = structlog.get_logger()


class Model(Saved, Protocol):
    """See `TrainedCritic`."""

    vocab_size: int
    max_sequence_length: int

    def configure(self, optimizer: OptimizerConfig) -> None:
        """Later steps use these settings."""

    def values(self, pack: Pack) -> npt.NDArray[np.float32]:
        """Values of the states before the pack's loss tokens, float32[N]."""

    def accumulate(self, pack: Pack) -> tuple[float, float]:
        """Adds a gradient; returns the sum of the losses, and the norm of the mean gradient so far."""

    def discard_gradients(self) -> None:
        """Discards the gradient."""

    def step(self, *, rate_factor: float, is_last: bool) -> None:
        """Takes the optimiser step."""

    def close(self) -> None:
        """Ends it; the last call."""


class KeptSteps:
    """The past in a folder; used by one thread.

    Args:
        folder: The critic's.
        make_model: Builds a critic that has learned nothing.
        checkpoint_every_steps: Steps between checkpoints.
    """

    def __init__(self, folder: StateFolder, *, make_model: Callable[[], Model], checkpoint_every_steps: int) -> None:
        """Raises OSError."""
        self._folder = folder
        self._make_model = make_model
        self._every = checkpoint_every_steps
        self._journal = Journal(folder.journal)
        self._checkpoints = KeptCheckpoints(folder.checkpoints, folder.stored_checkpoints)

    def model_at(self, place: Position) -> Model:
        """The model at that position: from the newest checkpoint before it, by the steps since.

        Raises:
            VersionConflictError: They do not lead there.
            BackendError, CheckpointFormatError, ConfigError, OSError: The model, a checkpoint or a step cannot be read.
        """
        self._checkpoints.refresh()
        self._journal.refresh()
        kept = [step for step in self._checkpoints.steps() if step <= place.policy_version]
        base = kept[-1] if kept else 0
        steps = [each for each in self._journal.positions() if (base, 0) <= each < place]
        if (reached := self._end_of(steps, begin=Position(base, 0))) != place:
            raise VersionConflictError(
                f"the critic's folder {self._folder.address} leads to {reached}, but the trainer is at {place}: give "
                f"the critic the {self._folder.setting} that it had in this run, or begin another run"
            )
        model = self._make_model()
        if kept:
            self._checkpoints.load(model, base)
        for each in steps:
            self._repeat(model, each)
        if steps:
            _log.info("steps taken again", num_steps=len(steps), first=str(steps[0]), now_at=str(place))
        return model

    def record(self, place: Position, record: critic_pb2.CriticRecord) -> None:
        """Keep a step that is to be taken there; stored when this returns. Raises OSError."""
        self._journal.append(place, record)

    def forget_beyond(self, place: Position) -> None:
        """Delete what lies beyond a position, to which the trainer has gone back."""
        self._journal.forget_from(place)
        for step in self._checkpoints.steps():
            if step > place.policy_version:
                self._checkpoints.delete(step)

    def keep(self, model: Model, policy_version: int, *, oldest: int) -> None:
        """Begin a checkpoint where one is due, and drop what the trainer can no longer go back to.

        Args:
            model: At the beginning of that version's step.
            policy_version: Its version.
            oldest: The trainer's oldest checkpoint.

        Raises:
            OSError: The disk or the storage refused this checkpoint or the one before.
        """
        is_due = policy_version % self._every == 0
        if is_due or self._checkpoints.is_written:
            self._checkpoints.finish()
        if is_due:
            self._checkpoints.begin(model, policy_version)
        complete = self._checkpoints.steps()
        base = max((step for step in complete if step <= oldest), default=0)
        for step in complete:
            if step < base:
                self._checkpoints.delete(step)
        self._journal.forget_before(base)

    def finish(self) -> None:
        """Complete the checkpoint that is being written. Raises OSError."""
        self._checkpoints.finish()

    def _end_of(self, steps: list[Position], *, begin: Position) -> Position:
        """How far kept steps lead without a gap."""
        reached = begin
        for each in steps:
            record = self._journal.read(each)
            if each != reached or record is None:
                break
            reached = each.after(is_last=record.step.is_last)
        return reached

    def _repeat(self, model: Model, position: Position) -> None:
        record = self._journal.read(position)
        assert record is not None
        model.configure(settings_of(record.optimizer))
        for pack in record.packs:
            model.accumulate(pack_for(model, pack, is_trained_on=True))
        model.step(rate_factor=record.step.rate_factor, is_last=record.step.is_last)
        REPEATED_STEPS.inc()


def pack_for(model: Model, pack: critic_pb2.CriticPack, *, is_trained_on: bool) -> Pack:
    """The pack in a message, if the model can take it; raises InvalidFieldError."""
    return decoded_pack(
        pack,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        is_trained_on=is_trained_on,
    )


def settings_of(optimizer: critic_pb2.CriticOptimizer) -> OptimizerConfig:
    """The settings in a message; raises InvalidFieldError."""
    document = {
        "learning_rate": optimizer.learning_rate,
        "betas": (optimizer.beta_1, optimizer.beta_2),
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
    }
    try:
        return validate(OptimizerConfig, document, source="optimizer")
    except ConfigError as error:
        raise InvalidFieldError(str(error), field="optimizer") from error
