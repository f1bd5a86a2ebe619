"""A run between its opening and its closing at the broker: publish, evaluate, train, evaluate, close.

Order that matters: OpenRun before the first publication (it gives the run's history counter); the first publication
before the first prompt (generators take no work without weights); a checkpoint before the last evaluation (whose crash
then costs no training); leftovers dropped before the closing, so that a finished run has nothing in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from penstock.process.tasks import end, run_beside
from penstock.v1 import trainer_pb2
from services.trainer.batches.replay_buffer import ReplayBuffer
from services.trainer.compute.compute_thread import ComputeThread, Interrupt
from services.trainer.data.prompt_order import EncodedPrompt, PromptStream
from services.trainer.model.backend import Backend
from services.trainer.publishing.publisher import WeightPublisher
from services.trainer.reporting.events import RunEvents
from services.trainer.reporting.metrics import JsonLines, Line
from services.trainer.reporting.overlap import OverlapMeter
from services.trainer.reporting.stall_timer import Cause
from services.trainer.run.context import RunContext
from services.trainer.run.evaluation import Evaluator
from services.trainer.run.loop import StepHooks, StepLoop
from services.trainer.run.monitor import RunMonitor
from services.trainer.run.prompt_feeder import PromptSubmitter, TrainingFeeder
from services.trainer.run.replay_feed import ReplayFeed

if TYPE_CHECKING:
    from torch import Tensor

_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class RunSession:
    """The parts of a run at work; `run_to_completion` is awaited once."""

    context: RunContext
    compute: ComputeThread
    backend: Backend
    interrupt: Interrupt
    meter: OverlapMeter
    publisher: WeightPublisher
    events: RunEvents
    metrics: JsonLines
    evaluations: JsonLines
    train_prompts: Sequence[EncodedPrompt]
    """Submitted by this run; empty where others put its groups."""
    held_out_prompts: Sequence[EncodedPrompt]
    write_checkpoint: Callable[[], Awaitable[None]]
    """Begins one; its files are written while training goes on."""
    watch_checkpoints: Callable[[], Coroutine[None, None, None]]
    """Raises when one cannot be written."""
    _history: int = field(default=0, init=False)
    _beside: asyncio.Task[None] | None = field(default=None, init=False)
    """An evaluation that runs while training goes on."""

    async def run_to_completion(self) -> None:
        """Everything from OpenRun to CloseRun; raises what a part raised."""
        progress = self.context.progress
        async with self.context.version_lock:
            opened = await self.context.take_over()
        self._history = opened.history
        if opened.num_samples_abandoned:
            _log.warning(
                "samples of later steps are no longer retained and were dropped",
                reason="abandoned_step",
                num_samples=opened.num_samples_abandoned,
            )
        self.publisher.open(instance_id=self.context.owner.instance_id, epoch=self.context.owner.epoch)
        await (await self._publish())
        submitter = PromptSubmitter(self.context.client, self.context.run_id)
        evaluator = Evaluator(
            context=self.context, submitter=submitter, prompts=self.held_out_prompts, record=self.evaluations
        )
        if opened.existed:
            await evaluator.forget_leftovers()
        if progress.policy_version == 0:
            await self._evaluate(evaluator)
        feeder = self._feeder(submitter)
        on_dropped = feeder.note_dropped_samples if feeder is not None else _ignore
        monitor = RunMonitor(context=self.context, meter=self.meter, on_dropped_samples=on_dropped)
        await self._train_with(feeder, monitor, evaluator)
        await self.write_checkpoint()
        await self._evaluate(evaluator)
        # Generators report their last spans a beat late; by now they have.
        await monitor.poll()
        # Also what agents put beyond the last step, of which nobody here knows.
        await self.context.client.close_run(self.context.run_id, drop_reason="run_complete")

    def _feeder(self, submitter: PromptSubmitter) -> TrainingFeeder | None:
        if not self.train_prompts:
            return None
        stream = PromptStream(
            self.train_prompts,
            seed=self.context.config.run.seed,
            shuffle=self.context.config.data.shuffle,
            position=self.context.progress.position,
        )
        return TrainingFeeder(context=self.context, submitter=submitter, stream=stream)

    async def _train_with(self, feeder: TrainingFeeder | None, monitor: RunMonitor, evaluator: Evaluator) -> None:
        config = self.context.config
        loops = (
            [monitor.run, self.watch_checkpoints]
            if feeder is None
            else [feeder.run, monitor.run, self.watch_checkpoints]
        )
        replay = self._replay()
        if replay is not None:
            loops.append(replay.run)
        hooks = StepHooks(on_waiting=self.events.say_waiting, on_step=self._note_step, publish=self._publish)
        loop = StepLoop(
            context=self.context,
            compute=self.compute,
            backend=self.backend,
            interrupt=self.interrupt,
            hooks=hooks,
            replay=replay,
        )
        if config.run.checkpoint_every_steps > config.policy.num_retained_steps:
            _log.warning(
                "the broker keeps the samples of the last steps only; resuming from a checkpoint older than that drops "
                "those of the steps between",
                checkpoint_every_steps=config.run.checkpoint_every_steps,
                num_retained_steps=config.policy.num_retained_steps,
            )
        try:
            await run_beside(self._train(loop, evaluator), loops)
        finally:
            if self._beside is not None:
                await end(self._beside)

    def _replay(self) -> ReplayFeed | None:
        run, policy = self.context.config.run, self.context.config.policy
        if not self.context.config.algorithm.num_replayed_groups:
            return None
        # What is retained beyond the window is what a run that goes back to its last checkpoint draws from once more.
        max_steps = max(1, policy.num_retained_steps - run.checkpoint_every_steps - 1)
        return ReplayFeed(self.context, ReplayBuffer(max_steps=max_steps, seed=run.seed))

    async def _train(self, loop: StepLoop, evaluator: Evaluator) -> None:
        num_steps = self.context.config.run.num_steps
        if self.context.progress.policy_version >= num_steps:
            return
        self.events.change_state(trainer_pb2.TRAINER_STATE_TRAINING)
        self.meter.begin(self.context.clock.monotonic_s())
        async with loop.session:
            while self.context.progress.policy_version < num_steps:
                await loop.take_step()
                with loop.waits.waiting(Cause.CHECKPOINTING):
                    await self._checkpoint_if_due()
                await self._after_step(evaluator)
            await loop.wait_until_published()
        self.meter.end(self.context.clock.monotonic_s())
        if self._beside is not None:
            await self._beside

    def _note_step(self, line: Line) -> None:
        self.metrics.append(line)
        self.events.report_step(policy_version=self.context.progress.policy_version, metrics=line)

    async def _checkpoint_if_due(self) -> None:
        if self.context.progress.policy_version % self.context.config.run.checkpoint_every_steps == 0:
            await self.write_checkpoint()

    async def _after_step(self, evaluator: Evaluator) -> None:
        run = self.context.config.run
        version = self.context.progress.policy_version
        if self._beside is not None and self._beside.done():
            self._beside.result()
            self._beside = None
        is_due = run.eval_every_steps > 0 and version % run.eval_every_steps == 0 and version < run.num_steps
        if is_due and self._beside is not None:
            _log.warning("an evaluation is left out: the last one is still under way", policy_version=version)
        elif is_due:
            self._beside = asyncio.create_task(self._measure(evaluator, version, on_waiting=lambda _reason: None))

    async def _evaluate(self, evaluator: Evaluator) -> None:
        """Measure the present version while nothing else goes on."""
        version = self.context.progress.policy_version
        self.events.change_state(trainer_pb2.TRAINER_STATE_EVALUATING, f"version {version}")
        await self._measure(evaluator, version, on_waiting=self.events.say_waiting)

    async def _measure(self, evaluator: Evaluator, version: int, *, on_waiting: Callable[[str], None]) -> None:
        if evaluator.has_prompts:
            report = await evaluator.measure(policy_version=version, history=self._history, on_waiting=on_waiting)
            self.events.report_evaluation(report)

    async def _publish(self) -> asyncio.Future[float]:
        """Copy the present weights, then write and offer them beside whatever comes next."""
        version = self.context.progress.policy_version
        tensors = await self.compute.run(_copied, self.backend)
        publishing = self.publisher.publish(
            tensors, policy_version=version, history=self._history, adapter=self.backend.adapter
        )
        return asyncio.ensure_future(publishing)


def _ignore(_num_samples: int) -> None:
    """Nobody here replaces what others put."""


def _copied(backend: Backend) -> dict[str, Tensor]:
    """The weights, on the CPU, in memory of their own: the next step changes the backend's in place."""
    return {name: tensor.cpu().clone().contiguous() for name, tensor in backend.state_tensors().items()}
