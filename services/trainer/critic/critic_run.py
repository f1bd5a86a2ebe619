"""One run's critic: where it is, and the gradient under way.

Invariants:
- A step is on the disk, or in the storage, before it is taken, and is taken once on the way to any position.
- It is always at the trainer's position or refuses: there are no values of another version.
- A gradient is of all its packs, in their order, and of one attempt of the trainer.
- Of several processes with one storage only the one that was opened last takes steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from penstock.config import ConfigError
from penstock.errors import FencedError, OffsetMismatchError, UnknownRunError, VersionConflictError, require
from penstock.storage.addresses import Address
from penstock.v1 import critic_pb2
from services.trainer.compute.speed import Speed
from services.trainer.critic.journal import Position
from services.trainer.critic.kept_steps import KeptSteps, Model, pack_for, settings_of
from services.trainer.critic.metrics import PACKS, POLICY_VERSION
from services.trainer.critic.state_folder import Owner, StateFolder
from services.trainer.model.backend import NonFiniteLossError

MAX_GRADIENT_BYTES = 1024**3
"""Of the packs of one minibatch, which wait in memory for its step."""
_log = structlog.get_logger()


class CriticRun:
    """Answers one trainer's calls, in one thread.

    Args:
        state_dir: Its folder; made if missing.
        make_model: Builds a critic that has learned nothing.
        checkpoint_every_steps: Steps between checkpoints.
        stored: Where all that it keeps is, if not in that folder.
        run_id: Of the only run that may have it; any if empty.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        make_model: Callable[[], Model],
        checkpoint_every_steps: int,
        stored: Address | None = None,
        run_id: str = "",
    ) -> None:
        """Raises ConfigError if another process or run has the folder, and OSError."""
        self._folder = StateFolder(state_dir, stored)
        if run_id:
            try:
                self._folder.check_run(run_id)
            except ConfigError:
                self._folder.release()
                raise
        self._kept = KeptSteps(self._folder, make_model=make_model, checkpoint_every_steps=checkpoint_every_steps)
        self._optimizer = critic_pb2.CriticOptimizer()
        self._model: Model | None = None
        """At the position; None before it was opened, and after a step that failed."""
        self._newest: Model | None = None
        """The same, also after that."""
        self._position = Position(0, 0)
        self._gradient_id: int | None = None
        self._packs: list[critic_pb2.CriticPack] = []
        self._num_bytes = 0
        self._answers: list[critic_pb2.AccumulateGradientResponse] = []
        self.speed = Speed()
        """Of the trainer's calls; steps that are taken again after a restart do not count."""

    def open(self, request: critic_pb2.OpenCriticRequest) -> critic_pb2.OpenCriticResponse:
        """Become that run's critic, at that position.

        Raises:
            FencedError, RunConflictError, VersionConflictError, InvalidFieldError: See the proto.
            BackendError, CheckpointFormatError, OSError: The model or a checkpoint cannot be read.
        """
        place = Position(request.place.policy_version, request.place.minibatch)
        optimizer = settings_of(request.optimizer)
        owner = Owner(run_id=request.run_id, instance_id=request.instance_id, epoch=request.place.epoch)
        if not self._folder.is_held():
            # It may have taken other steps since.
            self._end_model()
        self._folder.admit(owner, begins=place == (0, 0))
        if self._model is None or place != self._position:
            self._end_model()
            self._model = self._newest = self._kept.model_at(place)
            self._position = place
        self._optimizer = request.optimizer
        self._model.configure(optimizer)
        self._discard()
        self._kept.forget_beyond(place)
        POLICY_VERSION.set(place.policy_version)
        return critic_pb2.OpenCriticResponse(
            vocab_size=self._model.vocab_size, max_sequence_length=self._model.max_sequence_length
        )

    def evaluate(self, request: critic_pb2.EvaluatePackRequest) -> npt.NDArray[np.float32]:
        """Values of a pack, float32[N]; raises as the proto says."""
        model = self._called(request.run_id, request.place)
        self._require_position(request.place)
        require(request.place.minibatch == 0, "place.minibatch", request.place.minibatch, "0 for values")
        pack = pack_for(model, request.pack, is_trained_on=False)
        PACKS.labels("evaluated").inc()
        with self.speed.computing(pack.num_tokens):
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
        num_bytes = self._num_bytes + request.pack.ByteSize()
        require(num_bytes <= MAX_GRADIENT_BYTES, "pack", f"{num_bytes} bytes", f"{MAX_GRADIENT_BYTES} in a minibatch")
        pack = pack_for(model, request.pack, is_trained_on=True)
        try:
            with self.speed.computing():
                loss, norm = model.accumulate(pack)
        except NonFiniteLossError as error:
            _log.warning("a pack's loss is not finite", error=str(error))
            return critic_pb2.AccumulateGradientResponse(value_loss=math.nan)
        PACKS.labels("trained").inc()
        self._packs.append(request.pack)
        self._num_bytes = num_bytes
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
        self._require_held()
        self._kept.record(place, critic_pb2.CriticRecord(step=request, packs=self._packs, optimizer=self._optimizer))
        return True

    def _take(self, request: critic_pb2.StepCriticRequest) -> None:
        model = self._model
        assert model is not None
        # Until the step is done, there is no model at any position.
        self._model = None
        with self.speed.computing():
            model.step(rate_factor=request.rate_factor, is_last=request.is_last)
        self._position = self._position.after(is_last=request.is_last)
        self._forget_gradient()
        if request.is_last:
            self.speed.settle()
            POLICY_VERSION.set(self._position.policy_version)
            self._kept.keep(model, self._position.policy_version, oldest=request.oldest_policy_version)
        self._model = model

    def finish(self) -> None:
        """Complete the checkpoint that is being written, and end the model; no call follows. Raises OSError."""
        self._kept.finish()
        self._end_model()

    def _end_model(self) -> None:
        """There may be no memory, and no device, for two."""
        if self._newest is not None:
            self._newest.close()
        self._model = self._newest = None

    def release(self) -> None:
        """Let another process have the folder; no call follows."""
        self._folder.release()

    def _called(self, run_id: str, place: critic_pb2.CriticPlace) -> Model:
        """The model, for the trainer that has the critic."""
        owner = self._folder.owner
        if self._model is None or owner is None or owner.run_id != run_id:
            raise UnknownRunError(f"the critic is not open for run {run_id!r:.80}; call OpenCritic", run_id=run_id)
        if place.epoch > owner.epoch:
            raise UnknownRunError(f"no trainer of epoch {place.epoch} has opened the critic; call OpenCritic")
        if place.epoch < owner.epoch:
            raise FencedError(
                f"place.epoch: {place.epoch}, but a trainer of epoch {owner.epoch} has opened this critic"
            )
        return self._model

    def _require_position(self, place: critic_pb2.CriticPlace) -> None:
        asked = Position(place.policy_version, place.minibatch)
        if asked != self._position:
            self._require_held()
            raise VersionConflictError(f"the critic is at {self._position}, the call is for {asked}")

    def _require_held(self) -> None:
        if not self._folder.is_held():
            raise UnknownRunError("another process of this critic was opened since; call OpenCritic")

    def _discard(self) -> None:
        if self._model is not None:
            self._model.discard_gradients()
        self._forget_gradient()

    def _forget_gradient(self) -> None:
        self._gradient_id = None
        self._packs, self._answers, self._num_bytes = [], [], 0
