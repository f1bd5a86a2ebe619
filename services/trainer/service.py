"""The TrainerService: starts, follows, resumes and stops the one run of this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog

from penstock.config import ConfigError, validate
from penstock.errors import BusyError, InvalidFieldError, ServiceUnavailableError, UnknownRunError
from penstock.names import check_run_id
from penstock.network.outage import Outage
from penstock.v1 import broker_pb2, trainer_pb2, trainer_pb2_grpc
from services.trainer.checkpoints.checkpoint import CheckpointFormatError
from services.trainer.config import TrainingConfig
from services.trainer.folders.allowed_roots import Roots, require_file
from services.trainer.folders.kept_run import Kept, KeptRun
from services.trainer.folders.run_instance import read_instance
from services.trainer.run.context import RunSpec
from services.trainer.run.training_run import TrainingRun

MAX_CONFIG_BYTES = 1024 * 1024
_RUN_FILES = ("metrics.jsonl", "checkpoints", "summary.json")

_ENDS_AS_ASKED = (trainer_pb2.RUN_OUTCOME_COMPLETED, trainer_pb2.RUN_OUTCOME_STOPPED)

_log = structlog.get_logger()


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """At most one run at a time; the last one stays readable until another begins.

    Args:
        make_run: Builds a run that has not begun.
        weights_url: Base address of the HTTP server of weights.
        kept: Where the run is kept for the trainer's next start.
        roots: Where the paths that StartRun names must lie; below the working directory where None.
    """

    def __init__(
        self,
        *,
        make_run: Callable[[RunSpec], TrainingRun],
        weights_url: str,
        kept: KeptRun | None = None,
        roots: Roots | None = None,
    ) -> None:
        self.stopping = asyncio.Event()
        """Set when the server drains; replaced by the server's own event once that is built."""
        self.warnings: Callable[[], Sequence[str]] = lambda: ()
        """Returns the problems that need an operator; set by the server."""
        self._make_run = make_run
        self._weights_url = weights_url
        self._kept = kept or KeptRun()
        self._roots = roots or Roots([Path()])
        self._run: TrainingRun | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_delayed = False
        """Whether the current run waits before its next attempt, since it failed a moment ago."""

    async def StartRun(
        self, request: trainer_pb2.StartRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.StartRunResponse:
        """Begin a run, or return the folder of the current one if it has that name."""
        if self.stopping.is_set():
            raise ServiceUnavailableError("the trainer is draining")
        if self._run is not None and not self._run.events.is_finished:
            if self._run.spec.run_id != request.run_id:
                raise BusyError(
                    f"run {self._run.spec.run_id} is under way here; stop it or use another trainer",
                    run_id=self._run.spec.run_id,
                )
            if not self._is_delayed:
                return trainer_pb2.StartRunResponse(run_dir=str(self._run.spec.run_dir))
        spec = read_spec(request, self._roots)
        self._roots.make_run_dir(spec.run_dir)
        if self._is_delayed and self._run is not None and self._task is not None:
            # The cause of the failure may have been fixed: begin at once, as now requested.
            self._task.cancel()
            self._run.events.finish(
                trainer_pb2.RUN_OUTCOME_FAILED, message="begun again by StartRun", summary_json="", retry_delay_s=0.0
            )
        self._kept.write(
            Kept(
                run_id=request.run_id,
                config_json=request.config_json,
                num_begins=1,
                epoch=_known_epoch(spec),
            )
        )
        self._begin(spec, delay_s=0.0)
        return trainer_pb2.StartRunResponse(run_dir=str(spec.run_dir))

    @property
    def broker_outage(self) -> Outage | None:
        """Whether the broker of the current run is away; None without a run, or before its first call."""
        return self._run.broker.outage if self._run is not None and not self._run.events.is_finished else None

    def resume_kept(self) -> None:
        """Continue the run that this trainer's last process left, if there is one and no other has begun."""
        kept = self._kept.read()
        if kept is None or self._run is not None:
            return
        request = trainer_pb2.StartRunRequest(run_id=kept.run_id, config_json=kept.config_json, resume=True)
        try:
            spec = read_spec(request, self._roots)
            self._roots.make_run_dir(spec.run_dir)
        except (InvalidFieldError, ServiceUnavailableError, OSError) as error:
            _log.error("the kept run cannot be resumed; start it again", run_id=kept.run_id, error=str(error))
            return
        delay_s = self._kept.delay_s(kept.num_begins)
        self._kept.update(num_begins=kept.num_begins + 1)
        self._begin(_resumed(spec, kept), delay_s=delay_s)

    def _begin(self, spec: RunSpec, *, delay_s: float) -> None:
        self._run = self._make_run(spec)
        self._task = asyncio.create_task(self._keep_running(self._run, delay_s))

    async def _keep_running(self, run: TrainingRun, delay_s: float) -> None:
        """Run, and again after each failure that a retry may overcome."""
        while True:
            run.events.on_first_step = partial(self._kept.update, num_begins=0, problem="")
            run.retry_delay_s = partial(self._retry_delay_s, run)
            run.broker.keep_owner = lambda owner: self._kept.update(owner_id=owner.owner_id, epoch=owner.epoch)
            if delay_s:
                await self._delay(run, delay_s)
            await run.run()
            if run.outcome in _ENDS_AS_ASKED or run.is_final:
                self._kept.clear()
                return
            delay_s = self._retry_delay_s(run)
            if run.outcome != trainer_pb2.RUN_OUTCOME_FAILED or not delay_s:
                self._kept.update(num_begins=0)
                return
            num_begins = 1 if run.events.has_stepped else self._kept.present.num_begins + 1
            self._kept.update(num_begins=num_begins, problem=run.events.message)
            run = self._run = self._make_run(_resumed(run.spec, self._kept.present))

    def _retry_delay_s(self, run: TrainingRun) -> float:
        if not self._kept.is_kept or self.stopping.is_set():
            return 0.0
        return self._kept.delay_s(1 if run.events.has_stepped else self._kept.present.num_begins)

    async def _delay(self, run: TrainingRun, delay_s: float) -> None:
        """Wait before a retry; a stop ends the wait."""
        kept = self._kept.present
        why = f": {kept.problem}" if kept.problem else " without a step"
        message = f"it ended {max(1, kept.num_begins - 1)} times{why}; tries again in {delay_s:g} s"
        _log.warning("a run that failed is tried again later", run_id=run.spec.run_id, delay_s=delay_s)
        run.events.change_state(trainer_pb2.TRAINER_STATE_STARTING, message)
        self._is_delayed = True
        try:
            await run.stopped_within(delay_s)
        finally:
            self._is_delayed = False

    async def WatchRun(
        self, request: trainer_pb2.WatchRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[trainer_pb2.WatchRunResponse]:
        """Events from the requested one on; the stream stays open while the server drains, until the run has ended."""
        run = self._named(request.run_id)
        following = run.events.follow(from_sequence=request.from_sequence, incarnation=request.incarnation)
        async with aclosing(following) as events:
            async for event in events:
                yield event

    async def StopRun(
        self, request: trainer_pb2.StopRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.StopRunResponse:
        """Ask the run to stop; its end is an event."""
        self._named(request.run_id).request_stop()
        return trainer_pb2.StopRunResponse()

    async def GetTrainer(
        self, request: trainer_pb2.GetTrainerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.GetTrainerResponse:
        """The state of this trainer."""
        if self._run is None:
            return trainer_pb2.GetTrainerResponse(
                state=trainer_pb2.TRAINER_STATE_IDLE, weights_url=self._weights_url, warnings=self.warnings()
            )
        events = self._run.events
        return trainer_pb2.GetTrainerResponse(
            state=events.state,
            run_id=events.run_id,
            policy_version=events.policy_version,
            num_steps=events.num_steps,
            message=events.message,
            weights_url=self._weights_url,
            warnings=[*self.warnings(), *self._run.warnings],
        )

    async def stop(self, *, timeout_s: float) -> None:
        """Let the current run write a checkpoint within `timeout_s` s, for a later process to resume."""
        if self._run is None or self._task is None:
            return
        self._run.request_stop(is_drain=True)
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        if not done:
            _log.error("the run did not end in time and is abandoned", run_id=self._run.spec.run_id)

    def _named(self, run_id: str) -> TrainingRun:
        if self._run is None or self._run.spec.run_id != run_id:
            raise UnknownRunError(f"no run {run_id!r:.80} in this trainer; start it first", run_id=run_id)
        return self._run


def _resumed(spec: RunSpec, kept: Kept) -> RunSpec:
    """The run as this trainer resumes it automatically."""
    return replace(spec, resume=True, resumes=broker_pb2.RunOwner(owner_id=kept.owner_id, epoch=kept.epoch))


def _known_epoch(spec: RunSpec) -> int:
    """The newest epoch in the run's folder; 0 if there is none."""
    try:
        instance = read_instance(spec.run_dir) if spec.resume else None
    except CheckpointFormatError:
        # Restoring the run will report it.
        return 0
    return instance.epoch if instance is not None else 0


def read_spec(request: trainer_pb2.StartRunRequest, roots: Roots) -> RunSpec:
    """The run that StartRun requests, checked as far as possible without the model; raises InvalidFieldError."""
    check_run_id(request.run_id)
    if len(request.config_json) > MAX_CONFIG_BYTES:
        raise InvalidFieldError(f"config_json: longer than {MAX_CONFIG_BYTES} bytes", field="config_json")
    try:
        document = json.loads(request.config_json)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(f"config_json: not valid JSON: {error}", field="config_json") from error
    if not isinstance(document, dict):
        raise InvalidFieldError("config_json: must be an object", field="config_json")
    try:
        config = validate(TrainingConfig, document, source="config_json")
    except ConfigError as error:
        raise InvalidFieldError(str(error), field="config_json") from error
    if config.run.id not in ("", request.run_id):
        raise InvalidFieldError(
            f"run.id: {config.run.id!r} in config_json, but run_id is {request.run_id!r}", field="run_id"
        )
    run_dir = roots.run_dir(config.run.dir, request.run_id)
    if roots.has_own_runs and config.run.checkpoint_storage is None:
        raise InvalidFieldError(
            "run.checkpoint_storage: not set, and this trainer shares its run folders with no other (runs_dir); set "
            "it, or leave runs_dir out",
            field="run.checkpoint_storage",
        )
    _check_sources(config, roots)
    if not request.resume and any((run_dir / name).exists() for name in _RUN_FILES):
        raise InvalidFieldError(
            f"run_id: {run_dir} holds a run already; resume it, or choose another name", field="run_id"
        )
    return RunSpec(
        run_id=request.run_id,
        config=config,
        run_dir=run_dir,
        resume=request.resume,
        is_apart=roots.has_own_runs,
    )


def _check_sources(config: TrainingConfig, roots: Roots) -> None:
    sources = {
        "model.path": config.model.path,
        **config.data.files,
        "run.checkpoint_storage": config.run.checkpoint_storage,
    }
    for key, source in sources.items():
        if isinstance(source, Path):
            roots.require(key, source)
            require_file(key, source / "config.json" if key == "model.path" else source)
        elif source is not None:
            roots.require_storage(key, source)
