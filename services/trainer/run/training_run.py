"""The life of one run, from its configuration to its summary.

    load model and data -> open the run at the broker -> publish -> evaluate -> train -> checkpoint -> evaluate -> close
                                      (anywhere: stop or error -> checkpoint -> summary)

Promises:

- `run` never raises: how the run ended is its last event, and summary.json says the same.
- A stop abandons the step under way (its groups go back, being unacknowledged), writes a checkpoint of the present
  version, and leaves the run open at the broker, to be resumed.
- After an error that leaves the weights sound a checkpoint is written too; after a non-finite loss or gradient none
  is, and the last one stays as it was.
- A run that completes leaves nothing in flight and is closed at the broker.
- Once another trainer has taken the run over this one ends, and neither publishes nor writes a checkpoint or summary:
  the folder may be the other's too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from penstock.clients.broker import BrokerClient
from penstock.clock import Clock, SystemClock
from penstock.config import ConfigError
from penstock.errors import FencedError, OtherInstanceError, PenstockError, UnknownRunError
from penstock.network.outage import Outage
from penstock.process.disk import failure_message, full_message, is_full
from penstock.process.tasks import unless_set
from penstock.security import Security
from penstock.v1 import broker_pb2, trainer_pb2
from services.trainer.checkpoints.checkpoint import CheckpointFormatError
from services.trainer.checkpoints.checkpoint_writer import Checkpoints
from services.trainer.compute.compute_thread import ComputeThread, Interrupt, InterruptedComputeError
from services.trainer.config import TrainingConfig
from services.trainer.data.prompt_order import PromptSet, load_prompts
from services.trainer.folders.run_instance import RunInstance, new_instance, new_owner_id, read_instance, write_instance
from services.trainer.model.backend import Backend, BackendError
from services.trainer.publishing.publisher import WeightPublisher
from services.trainer.publishing.version_store import WeightStore
from services.trainer.reporting.events import RunEvents
from services.trainer.reporting.metrics import JsonLines
from services.trainer.reporting.overlap import OverlapMeter
from services.trainer.reporting.progress import Progress
from services.trainer.reporting.summary import RunFacts, build_summary, restate_end, write_summary
from services.trainer.reporting.trackers import TrackedLines, Trackers, open_trackers
from services.trainer.run.broker_session import RunSession
from services.trainer.run.context import Policy, RunContext, RunSpec
from services.trainer.step.step import EmptyStepError

BROKER_PATIENCE_S = 3.0

_FINAL_REASONS = frozenset(
    ("INVALID_FIELD", "RUN_CONFLICT", "RUN_CLOSED", "NOT_OFFERED", "BAD_TOKEN", "FENCED", "OTHER_INSTANCE")
)
"""Reasons of errors that end a run for good: repeated, they would say the same, or fight whoever took the run over."""

_log = structlog.get_logger()
_EXPECTED_ERRORS = (
    ConfigError,
    PenstockError,
    BackendError,
    EmptyStepError,
    CheckpointFormatError,
    OSError,
)


class TrainingRun:
    """One run in this process. `run` is awaited once; `request_stop` may come at any time, any number of times."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        store: WeightStore,
        weights_url: str,
        load_policy: Callable[[TrainingConfig], Policy],
        security: Security,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self._clock = clock or SystemClock()
        self.events = RunEvents(run_id=spec.run_id, num_steps=spec.config.run.num_steps, clock=self._clock)
        self._load_policy = load_policy
        self._security = security
        self._stop = asyncio.Event()
        self._interrupt = Interrupt()
        self._is_drained = False
        self.outcome: trainer_pb2.RunOutcome.ValueType = trainer_pb2.RUN_OUTCOME_UNSPECIFIED
        """How it ended; known when `run` has returned."""
        self.is_final = False
        """Whether it failed in a way that another try would only repeat."""
        self.retry_delay_s: Callable[[], float] = lambda: 0.0
        """Asked when it has failed: after how long it is begun again by itself; 0 for never."""
        self.keep_owner: Callable[[broker_pb2.RunOwner], None] = lambda owner: None
        """See `RunContext.keep_owner`."""
        self._meter = OverlapMeter()
        self._compute = ComputeThread(clock=self._clock, on_span=self._meter_span)
        self._checkpoints = Checkpoints(
            spec.run_dir / "checkpoints",
            keep_last=spec.config.run.keep_checkpoints,
            compute=self._compute,
            on_written=lambda version, path: self.events.report_checkpoint(policy_version=version, path=str(path)),
        )
        self._publisher = WeightPublisher(
            store=store,
            run_id=spec.run_id,
            directory=spec.run_dir / "weights",
            base_url=weights_url,
            clock=self._clock,
        )
        self._metrics = JsonLines(spec.run_dir / "metrics.jsonl")
        self._evaluations = JsonLines(spec.run_dir / "evaluations.jsonl")
        self._trackers = Trackers({})
        self.broker_outage: Outage | None = None
        """Whether the broker is away; None before it was first asked for anything."""
        self._backend: Backend | None = None
        self._opened: Backend | None = None
        self._progress = Progress()
        self._owner = broker_pb2.RunOwner(owner_id=new_owner_id())
        self._num_skipped_rows = 0
        self._is_fenced = False
        """Whether the run belongs to another trainer, or the id to another run."""
        self._is_restored = not spec.resume
        """Whether it is known how far the run has come."""
        self._started_s = self._clock.monotonic_s()

    def request_stop(self, *, is_drain: bool = False) -> None:
        """End the run soon: within one forward pass, and the time a checkpoint takes.

        With `is_drain` only this process ends, not the run; a stop that was asked for before or after counts more.
        """
        self._is_drained = is_drain and (self._is_drained or not self._stop.is_set())
        self._stop.set()
        self._interrupt.set()

    async def stopped_within(self, timeout_s: float) -> bool:
        """Whether a stop was requested, or is within that time."""
        try:
            await asyncio.wait_for(self._stop.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """The whole run."""
        try:
            await self._run()
        except Exception as error:  # Whoever follows the run waits for its end, even where ending it goes wrong.
            self.outcome = trainer_pb2.RUN_OUTCOME_FAILED
            self.events.finish(
                self.outcome,
                message=f"internal error: {type(error).__name__}: {error}",
                summary_json="",
                retry_delay_s=self.retry_delay_s() or None,
            )
            _log.error("the run did not end well", exc_info=error)

    async def _run(self) -> None:
        _log.info("run begins", run_id=self.spec.run_id, resume=self.spec.resume, run_dir=str(self.spec.run_dir))
        outcome, message, is_sound = await self._until_end()
        self._meter.end(self._clock.monotonic_s())
        try:
            if is_sound:
                await self.write_checkpoint()
            await self._checkpoints.finish()
            summary = await self._summary(outcome, message)
        except FencedError as error:
            outcome, message, summary = trainer_pb2.RUN_OUTCOME_FAILED, str(error), ""
        except (OSError, BackendError) as error:
            _log.error("the run's last files could not be written", error=str(error))
            outcome, summary = trainer_pb2.RUN_OUTCOME_FAILED, ""
            told = failure_message(self.spec.run_dir, error) if isinstance(error, OSError) else str(error)
            # A full disk refuses one file after the other: it is named once.
            message = told if is_full(error) or not message else f"{message}; {told}"
        finally:
            await self._close_backend()
            self._compute.close()
            await asyncio.to_thread(self._trackers.close)
        _log.info("run ends", run_id=self.spec.run_id, message=message, steps=self._progress.policy_version)
        self.outcome = outcome
        is_retried = outcome == trainer_pb2.RUN_OUTCOME_FAILED and not self.is_final
        retry_delay_s = (self.retry_delay_s() if is_retried else 0.0) or None
        self.events.finish(outcome, message=message, summary_json=summary, retry_delay_s=retry_delay_s)

    async def _summary(self, outcome: trainer_pb2.RunOutcome.ValueType, message: str) -> str:
        if self._is_fenced:
            return ""
        path = self.spec.run_dir / "summary.json"
        if not self._is_restored:
            # What the process before wrote is still true, but for how the run ended.
            return restate_end(path, outcome, message)
        audit = await self._last_words_with_broker()
        return write_summary(path, build_summary(self._facts(outcome, message, audit)))

    async def _until_end(self) -> tuple[trainer_pb2.RunOutcome.ValueType, str, bool]:
        """Outcome, message, and whether the weights are sound and worth a checkpoint."""
        try:
            is_completed = await unless_set(self._work(), self._stop)
        except _EXPECTED_ERRORS as error:
            self._is_fenced = isinstance(error, FencedError | OtherInstanceError)
            is_sound = not _is_broken(error) and not self._is_fenced
            if not self._stop.is_set() or not is_sound:
                message = full_message(self.spec.run_dir) if is_full(error) else str(error)
                _log.error("run failed", error=str(error))
                self.is_final = _is_final(error)
                return trainer_pb2.RUN_OUTCOME_FAILED, message, is_sound
            _log.info("ended while stopping", error=str(error))
            is_completed = None
        except Exception as error:  # The edge of the run: its end must be told, whatever it was.
            _log.error("run failed", exc_info=error)
            message = f"internal error: {type(error).__name__}: {error}; see the trainer's log"
            return trainer_pb2.RUN_OUTCOME_FAILED, message, False
        if is_completed:
            return trainer_pb2.RUN_OUTCOME_COMPLETED, "", True
        self.events.change_state(trainer_pb2.TRAINER_STATE_STOPPING, "writing a checkpoint")
        when = f"after step {self._progress.policy_version}" if self._is_restored else "before its next step"
        if self._is_drained:
            message = f"the trainer was told to end {when}; the run goes on when it is back"
            return trainer_pb2.RUN_OUTCOME_DRAINED, message, True
        return trainer_pb2.RUN_OUTCOME_STOPPED, f"stopped {when}; can be resumed", True

    async def _work(self) -> bool:
        config = self.spec.config
        await self._check_not_replaced()
        self.events.change_state(trainer_pb2.TRAINER_STATE_STARTING, f"loading {config.model.path}")
        policy = await self._compute.run(self._load_policy, config)
        backend = self._opened = policy.backend
        train, held_out = await self._compute.run(self._load_data, policy)
        self._num_skipped_rows = sum(prompts.num_skipped for prompts in (train, held_out) if prompts is not None)
        await self._restore(backend)
        self._backend = backend
        self.events.policy_version = self._progress.policy_version
        await asyncio.to_thread(self._open_trackers)
        self.events.change_state(trainer_pb2.TRAINER_STATE_STARTING, f"opening the run at broker {config.broker}")
        async with self._broker() as client:
            session = RunSession(
                context=self._context(client),
                compute=self._compute,
                backend=backend,
                interrupt=self._interrupt,
                meter=self._meter,
                publisher=self._publisher,
                events=self.events,
                metrics=self._metrics,
                evaluations=self._evaluations,
                train_prompts=train.prompts if train else (),
                held_out_prompts=held_out.prompts if held_out else (),
                write_checkpoint=self.write_checkpoint,
                watch_checkpoints=self._checkpoints.watch,
            )
            await session.run_to_completion()
        return True

    async def _check_not_replaced(self) -> None:
        """Before a run that is resumed automatically touches its folder, which may be its new trainer's too.

        Raises FencedError, and what `BrokerClient.get_run` does.
        """
        known = self.spec.resumes
        if known is None:
            return
        self.events.change_state(trainer_pb2.TRAINER_STATE_STARTING, f"asking broker {self.spec.config.broker}")
        async with self._broker() as client:
            try:
                view = await client.get_run(self.spec.run_id)
            except UnknownRunError:
                return
        if view.owner.epoch > known.epoch and view.owner.owner_id != known.owner_id:
            raise FencedError(
                f"fenced: trainer {view.owner.owner_id!r} took run {self.spec.run_id!r} over (epoch "
                f"{view.owner.epoch}, this trainer last knew {known.epoch}), so it is not resumed here automatically; "
                "start it here to take it back"
            )

    def _broker(self) -> BrokerClient:
        """A client that waits for the broker as long as the configuration says."""
        config = self.spec.config
        client = BrokerClient(
            config.broker, security=self._security, patience_s=config.run.patience_s, on_outage=self._note_outage
        )
        self.broker_outage = client.outage
        return client

    def _note_outage(self, text: str) -> None:
        if text:
            self.events.say_waiting(text)
        else:
            self.events.change_state(self.events.state)

    def _open_trackers(self) -> None:
        """Begin what the configuration asks for, and let lines go there; raises ConfigError."""
        config, run_dir = self.spec.config, self.spec.run_dir
        self._trackers = open_trackers(
            config.run.trackers,
            run_dir,
            run_id=self.spec.run_id,
            policy_version=self._progress.policy_version,
            document=config.model_dump(mode="json"),
            allows_plain=self._security.allows_plain,
        )
        self._metrics = TrackedLines(run_dir / "metrics.jsonl", self._trackers)
        self._evaluations = TrackedLines(run_dir / "evaluations.jsonl", self._trackers, prefix="eval/")

    def _load_data(self, policy: Policy) -> tuple[PromptSet | None, PromptSet | None]:
        """Training and held-out prompts, None where there are none."""
        config = self.spec.config
        longest = policy.backend.max_sequence_length - config.sampling.max_new_tokens
        if longest < 1:
            raise ConfigError(
                f"sampling.max_new_tokens: {config.sampling.max_new_tokens} leaves no room for a prompt in the model's "
                f"context of {policy.backend.max_sequence_length} tokens; lower it"
            )
        limit = min(config.data.max_prompt_tokens, longest)
        train = None
        if config.data.train is not None:
            train = load_prompts(config.data.train, policy.tokenizer, max_prompt_tokens=limit)
        if config.data.eval is None or config.run.num_eval_prompts == 0:
            return train, None
        held_out = load_prompts(config.data.eval, policy.tokenizer, max_prompt_tokens=limit)
        wanted = held_out.prompts[: config.run.num_eval_prompts]
        return train, PromptSet(prompts=wanted, num_skipped=held_out.num_skipped)

    async def _restore(self, backend: Backend) -> None:
        """Go on from the newest complete checkpoint, if that is asked for and there is one."""
        known = await asyncio.to_thread(read_instance, self.spec.run_dir) if self.spec.resume else None
        state = await self._checkpoints.load_latest(backend) if self.spec.resume else None
        if state is not None:
            self._progress = Progress.from_resume_state(state)
            self._meter.restore(self._progress.overlap)
            _log.info("resumed", policy_version=self._progress.policy_version)
        else:
            self._progress.instance_id = (known or new_instance()).instance_id
        await self._name_run(known)
        self._metrics.cut_after(self._progress.policy_version)
        self._evaluations.cut_after(self._progress.policy_version)
        # It tells how the run ended before. It goes on, and may end without a word.
        await asyncio.to_thread((self.spec.run_dir / "summary.json").unlink, missing_ok=True)
        self._is_restored = True

    async def _name_run(self, known: RunInstance | None) -> None:
        """Settle which run this is, in its folder first: the broker is told only what will be found again."""
        progress = self._progress
        if known is not None and known.instance_id == progress.instance_id:
            progress.epoch = max(progress.epoch, known.epoch)
        self._owner.instance_id = progress.instance_id
        instance = RunInstance(instance_id=progress.instance_id, epoch=progress.epoch)
        await asyncio.to_thread(write_instance, self.spec.run_dir, instance)

    async def write_checkpoint(self) -> None:
        """Begin a checkpoint of the present version, unless there is one.

        Raises:
            FencedError: another trainer has taken the run over, and its folder perhaps.
            OSError: also of the one before.
        """
        if self._backend is not None:
            await self._check_owner()
            # The steps of a checkpoint do not come again, nor do their lines.
            self._metrics.flush()
            self._evaluations.flush()
            overlap = self._meter.totals(self._clock.monotonic_s())
            state = self._progress.to_resume_state(wall_s=self._wall_s(), overlap=overlap)
            await self._checkpoints.begin(self._backend, state)

    async def _check_owner(self) -> None:
        """Raises FencedError; a broker that does not answer soon keeps nobody from writing a checkpoint."""
        async with BrokerClient(
            self.spec.config.broker, security=self._security, patience_s=BROKER_PATIENCE_S
        ) as client:
            try:
                async with asyncio.timeout(BROKER_PATIENCE_S):
                    await self._context(client).check_owner()
            except FencedError:
                self._is_fenced = True
                raise
            except (PenstockError, TimeoutError) as error:
                _log.warning("not known whether this is still the run's trainer", error=str(error))

    async def _close_backend(self) -> None:
        if self._opened is None:
            return
        try:
            await self._compute.run(self._opened.close)
        except Exception as error:  # What broke is told by the run's end; here something is only let go.
            _log.error("the trainer's processes do not end well", exc_info=error)

    def _wall_s(self) -> float:
        return self._progress.wall_s + self._clock.monotonic_s() - self._started_s

    def _meter_span(self, start_s: float, end_s: float) -> None:
        self._meter.add_trainer_span(start_s, end_s)

    async def _last_words_with_broker(self) -> broker_pb2.Audit | None:
        """Tell the broker of a step whose acknowledgement the stop cut short, and ask for the books.

        None when it does not answer soon, or does not know the run. Nothing is lost then: the checkpoint has it.
        """
        progress = self._progress
        target = self.spec.config.broker
        async with BrokerClient(target, security=self._security, patience_s=BROKER_PATIENCE_S) as client:
            try:
                async with asyncio.timeout(BROKER_PATIENCE_S):
                    if progress.acked_version < progress.policy_version:
                        await self._context(client).open_run(progress.policy_version)
                        progress.acked_version = progress.policy_version
                    return await client.audit(self.spec.run_id)
            except (PenstockError, TimeoutError) as error:
                _log.warning("no audit in the summary: the broker does not answer", error=str(error))
                return None

    def _context(self, client: BrokerClient) -> RunContext:
        client.owner = self._owner if self._owner.epoch else None
        return RunContext(
            spec=self.spec,
            client=client,
            progress=self._progress,
            version_lock=asyncio.Lock(),
            clock=self._clock,
            owner=self._owner,
            keep_owner=self.keep_owner,
        )

    def _facts(
        self, outcome: trainer_pb2.RunOutcome.ValueType, message: str, audit: broker_pb2.Audit | None
    ) -> RunFacts:
        return RunFacts(
            run_id=self.spec.run_id,
            seed=self.spec.config.run.seed,
            outcome=outcome,
            message=message,
            max_staleness=self.spec.config.algorithm.max_staleness,
            num_skipped_rows=self._num_skipped_rows,
            wall_s=self._wall_s(),
            progress=self._progress,
            overlap=self._meter.totals(self._clock.monotonic_s()),
            steps=self._metrics.read(),
            evaluations=self._evaluations.read(),
            audit=audit,
        )


def _is_final(error: Exception) -> bool:
    """Whether the same run would fail in the same way again, whatever happens meanwhile."""
    if isinstance(error, PenstockError):
        return error.reason in _FINAL_REASONS
    return isinstance(error, (ConfigError, CheckpointFormatError))


def _is_broken(error: Exception) -> bool:
    """Whether the backend failed by itself: its weights may then be those between two optimiser steps of a batch."""
    return isinstance(error, BackendError) and not isinstance(error, InterruptedComputeError)
