"""The life of one run, from its configuration to its summary.

    load model and data -> OpenRun -> publish -> evaluate -> train -> checkpoint -> evaluate -> CloseRun
                               (anywhere: stop or error -> checkpoint -> summary)

Order that matters: OpenRun before the first publication (it gives the run's history counter); the first publication
before the first prompt (generators take no work without weights); a checkpoint before the last evaluation (so that a
crash in it costs no training); leftovers dropped before CloseRun, so that a finished run has nothing in flight.

Promises:

- `run` never raises: how the run ended is its last event, and summary.json says the same.
- A stop abandons the current step (its groups are unacknowledged and go back), writes a checkpoint of the current
  version, and leaves the run open at the broker, to be resumed.
- After an error that leaves the weights sound a checkpoint is written too; after a non-finite loss or gradient none
  is, and the last one stays as it was.
- A run that completes leaves nothing in flight and is closed at the broker.
- Once another trainer has taken over the run, this one ends and neither publishes nor writes a checkpoint or summary:
  the folder may belong to the other by then.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from penstock.clock import Clock, SystemClock
from penstock.errors import FencedError, OtherInstanceError
from penstock.process.disk import failure_message, full_message, is_full
from penstock.process.tasks import run_beside, set_within, unless_set
from penstock.security import Security
from penstock.storage.addresses import Address
from penstock.storage.fetched import beside_loop
from penstock.storage.storage import StorageError
from penstock.v1 import broker_pb2, trainer_pb2
from services.trainer.checkpoints.checkpoint_storage import CheckpointStorage
from services.trainer.checkpoints.checkpoint_writer import Checkpoints
from services.trainer.compute.compute_thread import ComputeThread, Interrupt
from services.trainer.config import TrainingConfig
from services.trainer.data.environment import follow_environment
from services.trainer.data.prompt_mixture import PromptMixture
from services.trainer.data.prompt_order import training_position
from services.trainer.data.row_digests import HELD_OUT_KEY, ORDER_KEY, warn_of_held_out
from services.trainer.data.run_prompts import RunPrompts, load_run_prompts
from services.trainer.folders.run_instance import RunInstance, new_instance, read_instance, write_instance
from services.trainer.model.backend import Backend, BackendError
from services.trainer.publishing.publisher import WeightPublisher
from services.trainer.publishing.version_store import WeightStore
from services.trainer.reporting.events import RunEvents
from services.trainer.reporting.overlap import OverlapMeter
from services.trainer.reporting.progress import Progress
from services.trainer.reporting.run_records import EVALUATIONS, METRICS, RunRecords
from services.trainer.reporting.stall_timer import Cause
from services.trainer.reporting.summary import RunFacts, build_summary, restate_end, write_summary
from services.trainer.run.broker_link import BrokerLink
from services.trainer.run.context import Policy, RunContext, RunSpec
from services.trainer.run.critic_link import CriticLink, joined_critic
from services.trainer.run.evaluation import Evaluator
from services.trainer.run.loop import StepLoop
from services.trainer.run.monitor import RunMonitor
from services.trainer.run.prompt_feeder import PromptFeeder, PromptSubmitter
from services.trainer.run.replay_feed import replay_feed
from services.trainer.run.run_errors import EXPECTED_ERRORS, is_broken, is_final
from services.trainer.run.run_inputs import fetch_sources, stored_sources

_log = structlog.get_logger()


def _storage_of(spec: RunSpec) -> CheckpointStorage | None:
    """Where the run's checkpoints are copied to, if anywhere."""
    if spec.checkpoint_folder is None:
        return None
    return CheckpointStorage(spec.checkpoint_folder, [spec.run_dir / METRICS, spec.run_dir / EVALUATIONS])


class TrainingRun:
    """One run in this process. `run` is awaited once; `request_stop` may be called at any time, repeatedly."""

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
        self.broker = BrokerLink(spec, security=security, clock=self._clock, events=self.events)
        self._load_policy = load_policy
        self._security = security
        self._stop = asyncio.Event()
        self._interrupt = Interrupt()
        self._is_drained = False
        self.outcome: trainer_pb2.RunOutcome.ValueType = trainer_pb2.RUN_OUTCOME_UNSPECIFIED
        """How it ended; known when `run` has returned."""
        self.is_final = False
        """Whether it failed in a way that a retry would only repeat."""
        self.retry_delay_s: Callable[[], float] = lambda: 0.0
        """Called after a failure: seconds until the run is restarted automatically; 0 for never."""
        self._meter = OverlapMeter()
        self._compute = ComputeThread(clock=self._clock, on_span=self._meter.add_trainer_span)
        self._checkpoints = Checkpoints(
            spec.run_dir / "checkpoints",
            keep_last=spec.config.run.keep_checkpoints,
            compute=self._compute,
            on_written=self._note_checkpoint,
            storage=_storage_of(spec),
            check_owner=lambda: self.broker.check_owner(self._progress),
        )
        self._publisher = WeightPublisher(
            store=store,
            run_id=spec.run_id,
            directory=spec.run_dir / "weights",
            base_url=weights_url,
            clock=self._clock,
        )
        self._records = RunRecords(spec.run_dir, spec.config)
        self._critic: CriticLink | None = None
        self._opened: Backend | None = None
        """Closed when the run ends."""
        self._backend: Backend | None = None
        """The same, once its weights are those of `_progress`."""
        self._progress = Progress()
        self._mixture: PromptMixture | None = None
        self._held_out: dict[str, str] = {}
        """The run's prompts in order, as far as it submits any."""
        self._num_skipped_rows = 0
        self._is_fenced = False
        """Whether the run belongs to another trainer, or the id to another run."""
        self._is_restored = not spec.resume
        """Whether the run's progress is known."""
        self._started_s = self._clock.monotonic_s()

    def request_stop(self, *, is_drain: bool = False) -> None:
        """End the run soon: within one forward pass, and the time a checkpoint takes.

        With `is_drain` only this process ends, not the run; a full stop, requested earlier or later, takes precedence.
        """
        self._is_drained = is_drain and (self._is_drained or not self._stop.is_set())
        self._stop.set()
        self._interrupt.set()

    @property
    def warnings(self) -> Sequence[str]:
        """What needs an operator, a line each."""
        return [self._checkpoints.problem] if self._checkpoints.problem else []

    async def stopped_within(self, timeout_s: float) -> bool:
        """Whether a stop was requested, or is within that time."""
        return await set_within(self._stop, timeout_s)

    async def run(self) -> None:
        """The whole run."""
        try:
            await self._run()
        except Exception as error:  # Followers wait for the run's end, even if ending it fails.
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
                await self._write_checkpoint()
            await self._checkpoints.end()
            summary = await self._summary(outcome, message)
        except FencedError as error:
            outcome, message, summary = trainer_pb2.RUN_OUTCOME_FAILED, str(error), ""
        except (OSError, BackendError) as error:
            _log.error("the run's last files could not be written", error=str(error))
            outcome, summary = trainer_pb2.RUN_OUTCOME_FAILED, ""
            if isinstance(error, BackendError | StorageError):
                reported = str(error)
            else:
                reported = failure_message(self.spec.run_dir, error)
            # A full disk fails one write after another: report it once.
            message = reported if is_full(error) or not message else f"{message}; {reported}"
        finally:
            await self._publisher.close()
            await self._close_backend()
            self._compute.close()
            await asyncio.to_thread(self._records.close)
        _log.info("run ends", run_id=self.spec.run_id, message=message, steps=self._progress.policy_version)
        self.outcome = outcome
        is_retried = outcome == trainer_pb2.RUN_OUTCOME_FAILED and not self.is_final
        retry_delay_s = (self.retry_delay_s() if is_retried else 0.0) or None
        self.events.finish(outcome, message=message, summary_json=summary, retry_delay_s=retry_delay_s)

    async def _until_end(self) -> tuple[trainer_pb2.RunOutcome.ValueType, str, bool]:
        """Outcome, message, and whether the weights are sound and worth a checkpoint."""
        try:
            is_completed = await unless_set(self._work(), self._stop)
        except EXPECTED_ERRORS as error:
            self._is_fenced = isinstance(error, FencedError | OtherInstanceError)
            is_sound = not is_broken(error) and not self._is_fenced
            if not self._stop.is_set() or not is_sound:
                message = full_message(self.spec.run_dir) if is_full(error) else str(error)
                _log.error("run failed", error=str(error))
                self.is_final = is_final(error)
                return trainer_pb2.RUN_OUTCOME_FAILED, message, is_sound
            _log.info("ended while stopping", error=str(error))
            is_completed = None
        except Exception as error:  # The edge of the run: its end must be reported, whatever the cause.
            _log.error("run failed", exc_info=error)
            message = f"internal error: {type(error).__name__}: {error}; see the trainer's log"
            return trainer_pb2.RUN_OUTCOME_FAILED, message, False
        if is_completed:
            return trainer_pb2.RUN_OUTCOME_COMPLETED, "", True
        self.events.change_state(trainer_pb2.TRAINER_STATE_STOPPING, "writing a checkpoint")
        when = f"after step {self._progress.policy_version}" if self._is_restored else "before its next step"
        if self._is_drained:
            message = f"the trainer was stopped {when}; the run goes on when it is back"
            return trainer_pb2.RUN_OUTCOME_DRAINED, message, True
        return trainer_pb2.RUN_OUTCOME_STOPPED, f"stopped {when}; can be resumed", True

    async def _work(self) -> bool:
        config = self.spec.config
        await self.broker.check_not_replaced()
        if addresses := stored_sources(config):
            self.events.change_state(trainer_pb2.TRAINER_STATE_STARTING, f"fetching {addresses}")
            await beside_loop(fetch_sources, config)
        self.events.change_state(trainer_pb2.TRAINER_STATE_STARTING, f"loading {config.model.path}")
        policy = await self._compute.run(self._load_policy, config)
        backend = self._opened = policy.backend
        await follow_environment(config, policy.tokenizer)
        prompts = await self._compute.run(load_run_prompts, config, policy.tokenizer, backend.max_sequence_length)
        self._num_skipped_rows = prompts.num_skipped
        self._mixture, self._held_out = prompts.mixture(config), prompts.held_out_digests
        await self._restore(backend)
        self._backend = backend
        self.events.policy_version = self._progress.policy_version
        await asyncio.to_thread(
            self._records.open_trackers,
            run_id=self.spec.run_id,
            policy_version=self._progress.policy_version,
            allows_plain=self._security.allows_plain,
        )
        self.events.change_state(trainer_pb2.TRAINER_STATE_STARTING, f"opening the run at broker {config.broker}")
        async with self.broker.client() as client:
            context = self.broker.context(client, self._progress)
            opened = await self._open(context)
            async with joined_critic(
                context, security=self._security, events=self.events, check=self._interrupt.check
            ) as self._critic:
                context = replace(context, critic=self._critic)
                await self._publish_to_close(context, backend, prompts, existed=opened.existed)
        return True

    async def _restore(self, backend: Backend) -> None:
        """Continue from the newest complete checkpoint, if requested and there is one."""
        await self._checkpoints.check_storage(is_new=not self.spec.resume)
        known = await asyncio.to_thread(read_instance, self.spec.run_dir) if self.spec.resume else None
        if known is not None and self.spec.is_apart:
            await self._leave_what_was_abandoned(known)
        state = await self._checkpoints.load_latest(backend) if self.spec.resume else None
        if state is not None:
            self._progress = Progress.from_resume_state(state)
            if self._mixture is not None:
                self._mixture.load(state.extra.get(ORDER_KEY), position=self._progress.position)
            warn_of_held_out(state.extra.get(HELD_OUT_KEY), self._held_out)
            self._meter.restore(self._progress.overlap)
            _log.info("resumed", policy_version=self._progress.policy_version)
        else:
            self._progress.instance_id = (known or new_instance()).instance_id
        await self._name_run(known)
        self._records.cut_after(self._progress.policy_version)
        # The summary describes an earlier end. The run continues, and may end without writing a new one.
        await asyncio.to_thread((self.spec.run_dir / "summary.json").unlink, missing_ok=True)
        self._is_restored = True

    async def _leave_what_was_abandoned(self, known: RunInstance) -> None:
        """Delete checkpoints and records of steps that the run may not have any more.

        A trainer on another machine has gone on from the storage since: what this folder has beyond that, because this
        trainer was killed before it was uploaded, was taken again there.
        """
        if known.epoch >= await self.broker.newest_epoch():
            return
        deleted = await self._checkpoints.prefer_storage()
        _log.info("the run went on elsewhere: its checkpoints are taken from storage, not from here", deleted=deleted)
        await asyncio.to_thread(self._records.delete)

    async def _name_run(self, known: RunInstance | None) -> None:
        """Record in the folder which run this is before the broker learns of it, so that a crash cannot lose it."""
        progress = self._progress
        if known is not None and known.instance_id == progress.instance_id:
            progress.epoch = max(progress.epoch, known.epoch)
        self.broker.owner.instance_id = progress.instance_id
        instance = RunInstance(instance_id=progress.instance_id, epoch=progress.epoch)
        await asyncio.to_thread(write_instance, self.spec.run_dir, instance)

    async def _publish_to_close(
        self, context: RunContext, backend: Backend, prompts: RunPrompts, *, existed: bool
    ) -> None:
        """Everything after OpenRun up to CloseRun; raises what a part raised."""
        place = {"policy_version": self._progress.policy_version, "history": self._progress.history}
        written = await self._compute.run(backend.write_weights, self._publisher.path(**place))
        await self._publisher.publish(written, **place, adapter=backend.adapter)
        submitter = PromptSubmitter(context.client, context.run_id)
        evaluator = Evaluator(
            context=context,
            submitter=submitter,
            sources=prompts.held_out,
            record=self._records.evaluations,
            events=self.events,
        )
        if existed:
            await evaluator.forget_leftovers()
        if self._progress.policy_version == 0:
            await evaluator.measure()
        feeder = None
        if self._mixture is not None:
            feeder = PromptFeeder(context=context, submitter=submitter, mixture=self._mixture)
        replay = replay_feed(context)
        monitor = RunMonitor(context=context, meter=self._meter, feeder=feeder)
        loop = StepLoop(
            context=context,
            compute=self._compute,
            backend=backend,
            interrupt=self._interrupt,
            publisher=self._publisher,
            events=self.events,
            metrics=self._records.metrics,
            replay=replay,
        )
        loop.gaps = self._records.gaps
        if feeder is not None:
            loop.on_step, loop.order_metrics = feeder.note_step, feeder.metrics
        loops = [monitor.run, self._checkpoints.watch]
        loops += [part.run for part in (feeder, replay) if part is not None]
        try:
            await run_beside(self._train(loop, evaluator, feeder), loops)
        finally:
            await evaluator.cancel()
        await self._write_checkpoint()
        await evaluator.measure()
        # Generators report their last spans a heartbeat late; by now they have.
        await monitor.poll()
        # This also drops what agents put beyond the last step, which is unknown here.
        await context.client.close_run(context.run_id, drop_reason="run_complete")

    async def _open(self, context: RunContext) -> broker_pb2.OpenRunResponse:
        """Become the run's trainer, at the broker and for receivers of weights."""
        async with context.version_lock:
            opened = await context.take_over()
        if opened.num_samples_abandoned:
            _log.warning(
                "samples of later steps are no longer retained and were dropped",
                reason="abandoned_step",
                num_samples=opened.num_samples_abandoned,
            )
        every, retained = context.config.run.checkpoint_every_steps, context.config.policy.num_retained_steps
        if every > retained:
            _log.warning(
                "the broker keeps the samples of the last steps only; resuming from a checkpoint older than that drops "
                "those of the steps between",
                checkpoint_every_steps=every,
                num_retained_steps=retained,
            )
        self._publisher.open(instance_id=context.owner.instance_id, epoch=context.owner.epoch)
        return opened

    async def _train(self, loop: StepLoop, evaluator: Evaluator, feeder: PromptFeeder | None) -> None:
        run, progress = self.spec.config.run, self._progress
        if progress.policy_version >= run.num_steps:
            return
        self.events.change_state(trainer_pb2.TRAINER_STATE_TRAINING)
        self._meter.begin(self._clock.monotonic_s())
        async with loop.session:
            needs_accuracy = self.spec.config.data.needs_accuracy
            if needs_accuracy:
                evaluator.begin_again()
            while progress.policy_version < run.num_steps:
                if feeder is not None and needs_accuracy and (progress.policy_version + 1) % run.eval_every_steps == 0:
                    with loop.waits.waiting(Cause.SAMPLES):
                        measured = progress.policy_version + 1 - run.eval_every_steps
                        feeder.accuracies = await evaluator.accuracies(measured)
                await loop.take_step()
                if progress.policy_version % run.checkpoint_every_steps == 0:
                    with loop.waits.waiting(Cause.CHECKPOINTING):
                        await self._write_checkpoint(may_skip=progress.policy_version < run.num_steps)
                evaluator.begin_if_due()
            await self._publisher.finish()
        self._meter.end(self._clock.monotonic_s())
        await evaluator.finish()

    async def _write_checkpoint(self, *, may_skip: bool = False) -> None:
        """Begin a checkpoint of the current version, unless there is one; training continues while files are written.

        With `may_skip` none is begun while the one before is still being uploaded.

        Raises:
            FencedError: Another trainer has taken over the run, and perhaps its folder.
            OSError: This checkpoint or the previous one could not be written.
        """
        if self._backend is not None:
            await self.broker.check_owner(self._progress)
            # Steps that a checkpoint covers are not repeated after a resume: their lines must be on disk.
            self._records.flush()
            overlap = self._meter.totals(self._clock.monotonic_s())
            state = self._progress.to_resume_state(wall_s=self._wall_s(), overlap=overlap)
            state = replace(state, extra={**state.extra, HELD_OUT_KEY: json.dumps(self._held_out)})
            if self._mixture is not None:
                outstanding = [training_position(group_id) for group_id in self._progress.outstanding]
                state = replace(state, extra={**state.extra, ORDER_KEY: self._mixture.dump(outstanding)})
            await self._checkpoints.begin(self._backend, state, may_skip=may_skip)

    def _note_checkpoint(self, version: int, path: Path | Address) -> None:
        self.events.report_checkpoint(policy_version=version, path=str(path))
        if self._critic is not None:
            self._critic.note_checkpoint(version)

    async def _close_backend(self) -> None:
        if self._opened is None:
            return
        try:
            await self._compute.run(self._opened.close)
        except Exception as error:  # Failures belong to the run's outcome; this only releases resources.
            _log.error("the trainer's processes do not end well", exc_info=error)

    async def _summary(self, outcome: trainer_pb2.RunOutcome.ValueType, message: str) -> str:
        if self._is_fenced:
            return ""
        path = self.spec.run_dir / "summary.json"
        if not self._is_restored:
            # What the previous process wrote still holds, except for how the run ended.
            return restate_end(path, outcome, message)
        facts = RunFacts(
            run_id=self.spec.run_id,
            seed=self.spec.config.run.seed,
            outcome=outcome,
            message=message,
            max_staleness=self.spec.config.algorithm.max_staleness,
            num_skipped_rows=self._num_skipped_rows,
            audit=await self.broker.final_audit(self._progress),
            wall_s=self._wall_s(),
            progress=self._progress,
            overlap=self._meter.totals(self._clock.monotonic_s()),
            steps=self._records.metrics.read(),
            evaluations=self._records.evaluations.read(),
            sources=self.spec.config.data.source_names,
        )
        return write_summary(path, build_summary(facts))

    def _wall_s(self) -> float:
        return self._progress.wall_s + self._clock.monotonic_s() - self._started_s
