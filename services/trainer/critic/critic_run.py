"""One run's critic: where it is, the gradient under way, and what it keeps on its disk.

    state_dir/run.json       whose critic this is: run, instance, newest epoch
    state_dir/checkpoints/   as a trainer's
    state_dir/journal/       the optimiser steps since the oldest of them

Invariants:
- A step is in the journal before it is taken, and is taken once on the way from a checkpoint to any position: a process
  that is killed anywhere returns to the last step that it confirmed, bit for bit on the same machine with as many
  threads.
- It is always at the trainer's position or refuses: there are no values of another version.
- What the trainer may go back to is kept: the newest checkpoint that is no newer than the trainer's oldest one, and all
  steps since.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog

from penstock.config import ConfigError
from penstock.errors import (
    FencedError,
    InvalidFieldError,
    OffsetMismatchError,
    RunConflictError,
    UnknownRunError,
    VersionConflictError,
    require,
)
from penstock.process.durable_files import replace_file
from penstock.v1 import critic_pb2
from services.trainer.batches.critic_packs import decoded_pack
from services.trainer.batches.packing import Pack
from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.checkpoint import CheckpointFormatError, ResumeState, Saved, Saving
from services.trainer.critic.journal import Journal, Position
from services.trainer.critic.metrics import PACKS, POLICY_VERSION, REPEATED_STEPS
from services.trainer.model.backend import NonFiniteLossError
from services.trainer.run_sections import OptimizerConfig

MAX_GRADIENT_BYTES = 1024**3
"""Of the packs of one minibatch, which wait in memory for its step."""
_RUN_FILE, _LOCK_FILE = "run.json", ".lock"
_log = structlog.get_logger()


class Model(Saved, Protocol):
    """See `TrainedCritic`."""

    vocab_size: int
    max_sequence_length: int

    def values(self, pack: Pack) -> npt.NDArray[np.float32]:
        """Values of the states before the pack's loss tokens, float32[N]."""

    def accumulate(self, pack: Pack) -> tuple[float, float]:
        """Adds a gradient; returns the sum of the losses, and the norm of the mean gradient so far."""

    def discard_gradients(self) -> None:
        """Discards the gradient."""

    def step(self, *, rate_factor: float, is_last: bool) -> None:
        """Takes the optimiser step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """Whose critic a folder holds."""

    run_id: str
    instance_id: str
    epoch: int


class CriticRun:
    """Answers one trainer's calls, in one thread.

    Args:
        state_dir: Its folder; made if missing.
        make_model: Builds a critic that has learned nothing, with an optimiser of those settings.
        checkpoint_every_steps: Steps between checkpoints.
    """

    def __init__(
        self, state_dir: Path, *, make_model: Callable[[OptimizerConfig], Model], checkpoint_every_steps: int
    ) -> None:
        """Raises ConfigError if another process has the folder, and OSError."""
        self._state_dir = state_dir
        state_dir.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(state_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"state_dir: {state_dir}: another critic works there; end it, or name another folder"
            ) from None
        self._make_model = make_model
        self._every = checkpoint_every_steps
        self._checkpoints = state_dir / "checkpoints"
        self._journal = Journal(state_dir / "journal")
        self._identity: _Identity | None = None
        self._optimizer: OptimizerConfig | None = None
        self._model: Model | None = None
        self._position = Position(0, 0)
        self._saving: Saving | None = None
        self._gradient_id: int | None = None
        self._packs: list[critic_pb2.CriticPack] = []
        self._answers: list[critic_pb2.AccumulateGradientResponse] = []

    def open(self, request: critic_pb2.OpenCriticRequest) -> critic_pb2.OpenCriticResponse:
        """Become that run's critic, at that position.

        Raises:
            FencedError, RunConflictError, VersionConflictError, InvalidFieldError: See the proto.
            BackendError, CheckpointFormatError, OSError: The model or a checkpoint cannot be read.
        """
        place = Position(request.place.policy_version, request.place.minibatch)
        self._take_identity(
            _Identity(run_id=request.run_id, instance_id=request.instance_id, epoch=request.place.epoch),
            begins=place == (0, 0),
        )
        optimizer = _optimizer_of(request)
        if self._model is None or optimizer != self._optimizer or place != self._position:
            self._go_to(place, optimizer)
        self._discard()
        self._journal.forget_from(place)
        for path in checkpoint.list_complete(self._checkpoints):
            if _step_of(path) > place.policy_version:
                shutil.rmtree(path)
        POLICY_VERSION.set(place.policy_version)
        assert self._model is not None
        return critic_pb2.OpenCriticResponse(
            vocab_size=self._model.vocab_size, max_sequence_length=self._model.max_sequence_length
        )

    def evaluate(self, request: critic_pb2.EvaluatePackRequest) -> npt.NDArray[np.float32]:
        """Values of a pack, float32[N]; raises as the proto says."""
        model = self._called(request.run_id, request.place)
        self._require_position(request.place)
        require(request.place.minibatch == 0, "place.minibatch", request.place.minibatch, "0 for values")
        pack = self._decoded(model, request.pack, is_trained_on=False)
        PACKS.labels("evaluated").inc()
        return model.values(pack)

    def accumulate(self, request: critic_pb2.AccumulateGradientRequest) -> critic_pb2.AccumulateGradientResponse:
        """Add a pack to the gradient, unless it is in it; raises as the proto says."""
        model = self._called(request.run_id, request.place)
        self._require_position(request.place)
        if self._gradient_id is not None and request.gradient_id < self._gradient_id:
            raise OffsetMismatchError(f"gradient_id: {request.gradient_id} was given up for {self._gradient_id}")
        if request.gradient_id != self._gradient_id:
            self._discard()
            self._gradient_id = request.gradient_id
        if request.index < len(self._answers):
            return self._answers[request.index]
        if request.index > len(self._answers):
            raise OffsetMismatchError(f"index: {request.index}, but the gradient has {len(self._answers)} packs")
        num_bytes = sum(pack.ByteSize() for pack in (*self._packs, request.pack))
        require(num_bytes <= MAX_GRADIENT_BYTES, "pack", f"{num_bytes} bytes", f"{MAX_GRADIENT_BYTES} in a minibatch")
        pack = self._decoded(model, request.pack, is_trained_on=True)
        try:
            loss, norm = model.accumulate(pack)
        except NonFiniteLossError as error:
            _log.warning("a pack's loss is not finite", error=str(error))
            return critic_pb2.AccumulateGradientResponse(value_loss=math.nan)
        PACKS.labels("trained").inc()
        self._packs.append(request.pack)
        self._answers.append(critic_pb2.AccumulateGradientResponse(value_loss=loss, gradient_norm=norm))
        return self._answers[-1]

    def step(self, request: critic_pb2.StepCriticRequest, *, on_recorded: Callable[[], None]) -> None:
        """Take a step, unless it was taken before; after an error that follows `on_recorded` the critic must be opened.

        Args:
            request: Which.
            on_recorded: Called once the step is on the disk, before it is taken.

        Raises:
            OffsetMismatchError, VersionConflictError, InvalidFieldError: See the proto; nothing has changed.
            OSError: The disk refused; nothing has changed, or `on_recorded` was called before.
        """
        is_new = self._record(request)
        on_recorded()
        if is_new:
            self._take(request)

    def _record(self, request: critic_pb2.StepCriticRequest) -> bool:
        """Put the step into the journal; False if it was taken before."""
        self._called(request.run_id, request.place)
        place = Position(request.place.policy_version, request.place.minibatch)
        if place.after(is_last=request.is_last) == self._position:
            return False
        self._require_position(request.place)
        if not request.num_packs:
            self._discard()
        elif (request.gradient_id, request.num_packs) != (self._gradient_id, len(self._packs)):
            raise OffsetMismatchError(f"num_packs: the critic has {len(self._packs)} of {request.num_packs}")
        require(0 < request.rate_factor <= 1, "rate_factor", request.rate_factor, "above 0, at most 1")
        norm = self._answers[-1].gradient_norm if self._answers else 0.0
        require(math.isfinite(norm), "gradient_id", norm, "a gradient whose norm is finite")
        self._journal.append(place, critic_pb2.CriticRecord(step=request, packs=self._packs))
        return True

    def _take(self, request: critic_pb2.StepCriticRequest) -> None:
        model = self._model
        assert model is not None
        # Until the step is done, there is no model at any position.
        self._model = None
        model.step(rate_factor=request.rate_factor, is_last=request.is_last)
        self._position = self._position.after(is_last=request.is_last)
        self._forget_gradient()
        if request.is_last:
            POLICY_VERSION.set(self._position.policy_version)
            self._keep(model, oldest=request.oldest_policy_version)
        self._model = model

    def finish(self) -> None:
        """Complete the checkpoint that is being written. Raises OSError."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            # What is pruned is decided by the trainer's checkpoints, not by a number.
            saving.finish(keep_last=1 << 30)

    def _keep(self, model: Model, *, oldest: int) -> None:
        """Begin a checkpoint where one is due, and drop what the trainer can no longer go back to."""
        version = self._position.policy_version
        if self._saving is not None and (version % self._every == 0 or self._saving.written.done()):
            self.finish()
        if version % self._every == 0:
            self._saving = checkpoint.begin(self._checkpoints, backend=model, state=ResumeState(num_steps=version))
        kept = [_step_of(path) for path in checkpoint.list_complete(self._checkpoints)]
        base = max((step for step in kept if step <= oldest), default=0)
        for path in checkpoint.list_complete(self._checkpoints):
            if _step_of(path) < base:
                shutil.rmtree(path)
        self._journal.forget_before(base)

    def _go_to(self, place: Position, optimizer: OptimizerConfig) -> None:
        """The model at that position: from the newest checkpoint before it, by the steps since."""
        self._model = None
        self.finish()
        kept = [path for path in checkpoint.list_complete(self._checkpoints) if _step_of(path) <= place.policy_version]
        base = _step_of(kept[-1]) if kept else 0
        steps = [each for each in self._journal.positions() if (base, 0) <= each < place]
        reached = Position(base, 0)
        for each in steps:
            record = self._journal.read(each)
            if each != reached or record is None:
                break
            reached = each.after(is_last=record.step.is_last)
        if reached != place:
            raise VersionConflictError(
                f"the critic's folder {self._state_dir} leads to {reached}, but the trainer is at {place}: give the "
                "critic the state_dir that it had in this run, or begin another run"
            )
        model = self._make_model(optimizer)
        if kept:
            model.load(kept[-1])
        for each in steps:
            self._repeat(model, each)
        if steps:
            _log.info("steps taken again", num_steps=len(steps), first=str(steps[0]), now_at=str(place))
        self._model, self._optimizer, self._position = model, optimizer, place

    def _repeat(self, model: Model, position: Position) -> None:
        record = self._journal.read(position)
        assert record is not None
        for pack in record.packs:
            model.accumulate(self._decoded(model, pack, is_trained_on=True))
        model.step(rate_factor=record.step.rate_factor, is_last=record.step.is_last)
        REPEATED_STEPS.inc()

    def _take_identity(self, asked: _Identity, *, begins: bool) -> None:
        """Let the newest trainer of one run have the critic, and no other."""
        known = self._identity or self._read_identity()
        if known is not None and (known.run_id, known.instance_id) != (asked.run_id, asked.instance_id):
            raise RunConflictError(
                f"state_dir: {self._state_dir} holds the critic of run {known.run_id!r} (instance "
                f"{known.instance_id}), not of {asked.run_id!r} ({asked.instance_id}); start the critic with a folder "
                "of its own"
            )
        if known is None and not begins:
            raise VersionConflictError(
                f"state_dir: {self._state_dir} is empty, but the trainer has taken steps: give the critic the "
                "state_dir that it had in this run, or begin another run"
            )
        if known is not None and asked.epoch < known.epoch:
            raise FencedError(f"place.epoch: {asked.epoch}, but a trainer of epoch {known.epoch} has this critic")
        if asked != known:
            replace_file(self._state_dir / _RUN_FILE, json.dumps(asdict(asked)))
        self._identity = asked

    def _read_identity(self) -> _Identity | None:
        path = self._state_dir / _RUN_FILE
        try:
            return _Identity(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CheckpointFormatError(f"{path}: cannot be read: {error}") from error

    def _called(self, run_id: str, place: critic_pb2.CriticPlace) -> Model:
        """The model, for the trainer that has the critic."""
        if self._model is None or self._identity is None or self._identity.run_id != run_id:
            raise UnknownRunError(f"the critic is not open for run {run_id!r:.80}; call OpenCritic", run_id=run_id)
        if place.epoch > self._identity.epoch:
            raise UnknownRunError(f"no trainer of epoch {place.epoch} has opened the critic; call OpenCritic")
        if place.epoch < self._identity.epoch:
            raise FencedError(
                f"place.epoch: {place.epoch}, but a trainer of epoch {self._identity.epoch} has opened this critic"
            )
        return self._model

    def _require_position(self, place: critic_pb2.CriticPlace) -> None:
        asked = Position(place.policy_version, place.minibatch)
        if asked != self._position:
            raise VersionConflictError(f"the critic is at {self._position}, the call is for {asked}")

    def _decoded(self, model: Model, pack: critic_pb2.CriticPack, *, is_trained_on: bool) -> Pack:
        return decoded_pack(
            pack,
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_sequence_length,
            is_trained_on=is_trained_on,
        )

    def _discard(self) -> None:
        if self._model is not None:
            self._model.discard_gradients()
        self._forget_gradient()

    def _forget_gradient(self) -> None:
        self._gradient_id = None
        self._packs, self._answers = [], []


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _optimizer_of(request: critic_pb2.OpenCriticRequest) -> OptimizerConfig:
    try:
        return OptimizerConfig(
            learning_rate=request.learning_rate,
            betas=(request.beta_1, request.beta_2),
            weight_decay=request.weight_decay,
            max_grad_norm=request.max_grad_norm,
        )
    except ValueError as error:
        raise InvalidFieldError(f"optimizer: {error}", field="learning_rate") from error
