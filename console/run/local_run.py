"""Implements `penstock run`: check, start, follow, stop, report.

    checks --problem--> exit 2, nothing was started
      |
    services start --interrupt or failure--> services stop, exit 130 or 1
      |
    trainer runs --Ctrl-C--> StopRun, the trainer writes a checkpoint --+
      |                                                                 |
    services stop, report, exit 0 (completed) or 1 (failed)       exit 130, resumable

Signals in quick succession, as from `timeout` or from two quick presses of Ctrl-C, count as one; only a later one kills
everything at once. A full run folder (`console.launch.disk_watch`) stops the run as Ctrl-C does, but with exit status 1
and a line that gives the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from console.advice.of_run import final_advice
from console.config.config import RunConfig, to_yaml
from console.config.derive import training_config
from console.config.folder_lock import locked
from console.config.run_folder import (
    CONSOLE_NAME,
    ProcessRecord,
    RunFolder,
    started_ticks_of,
)
from console.devices.device_table import summary_line
from console.devices.run_devices import RunDevices
from console.launch.disk_watch import FolderRefusedError, watch_disk
from console.launch.launcher import MODEL_READY_S, Launcher
from console.launch.probes import TLS_FAILS, service_problem
from console.launch.supervisor import ProcessState, ServiceFailedError
from console.page.report import write_report
from console.run.as_planned import elsewhere
from console.run.follow import STOP_TIMEOUT_S, RunSession, TrainerLostError
from console.run.machine_report import report_machine
from console.run.preflight import check_run
from console.run.run_page import serve_run_page
from console.run.run_plan import RunPlan
from console.run.run_recorder import KEPT_SAMPLES, TRAJECTORIES, RunRecorder
from console.view.closed_output import discard
from console.view.forecast_quality import Document, fetch_lengths
from console.view.formats import duration
from console.view.live_display import choose_display
from console.view.outcome import add_to_summary, closing_lines, keep_results, read_lines, read_summary
from console.view.run_view import RunView
from penstock.config import ConfigError
from penstock.errors import PenstockError
from penstock.process.disk import failure_message
from penstock.process.durable_files import replace_file
from penstock.process.grace_periods import CHECKPOINT_S
from penstock.process.signals import FORCE_AFTER_S, StopSignals
from penstock.process.tasks import end, race
from penstock.security import Security
from penstock.v1 import trainer_pb2
from services.trainer.config import TrainingConfig

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
# The step under way ends and a checkpoint is written: seconds for a small model, longer for a large one.
FIRST_WAIT_NOTE_S = 5.0
"""A service that is not up after this long is named, with the reason."""
STOP_WAIT_S = CHECKPOINT_S + 15.0
ASK_EVERY_S = 0.5
"""How often a service that a machine of the plan starts is asked whether it is up."""

_Result = TypeVar("_Result")


class InterruptedByUserError(Exception):
    """Ctrl-C or SIGTERM."""


async def execute_run(config: RunConfig, *, is_resume: bool, source: str, may_be_begun: bool = False) -> int:
    """Carry out a run from checks to report; returns the exit status. Raises ConfigError before anything is started.

    Args:
        config: Of the run.
        is_resume: Whether its folder is here.
        source: Names the configuration in errors.
        may_be_begun: Whether its trainer goes on with it if there are checkpoints of it.
    """
    security = Security.from_environment(insecure=config.insecure)
    folder = RunFolder(config.run.dir / config.run.id)
    with contextlib.ExitStack() as held:
        notes = [held.enter_context(locked(folder.path))] if is_resume else []
        checked = await check_run(config, folder, is_resume=is_resume, security=security, source=source)
        if not is_resume:
            notes = [held.enter_context(locked(folder.path))]
        run = _Run(config, folder, security=security, source=source, devices=checked.devices)
        gpus = "" if checked.devices is None else summary_line(checked.devices)
        run.trainer_resumes = is_resume or may_be_begun
        return await run.execute(filter(None, [*notes, *checked.notes, gpus]), is_resume=is_resume)


class _Run:
    """One run, from the first process to the report."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, *, security: Security, source: str, devices: RunDevices | None
    ) -> None:
        self._config = config
        self._folder = folder
        self._security = security
        self._source = source
        self._devices = devices
        self.trainer_resumes = False
        """Whether the trainer goes on with the run if it knows it."""
        self._view = RunView(run_id=config.run.id, num_steps=config.run.num_steps)
        self._display = choose_display(self._view)
        self._signals = StopSignals(force=self._force)
        self._interrupted = self._signals.requested
        self._launcher = Launcher(
            config,
            folder,
            security=security,
            devices=devices,
            on_change=self._take_change,
            on_wait=self._note_wait,
        )
        self._noted_waits: set[str] = set()
        self._session: RunSession | None = None
        self._refusal = ""
        """Why the folder cannot be written to; empty while it can."""
        self._recorder = self._make_recorder()
        self._plan = self._make_plan()
        self._helpers: list[asyncio.Task[None]] = []
        self._lengths: Document | None = None
        """Quality of the length forecasts; None if the scheduler does not report it."""

    async def execute(self, notes: Iterable[str], *, is_resume: bool) -> int:
        """Carry out the run after the checks, in a locked folder; returns the exit status."""
        try:
            if not is_resume:
                # Written first: it makes the folder a run's, which can be resumed whatever happens next.
                replace_file(self._folder.config, to_yaml(self._config))
            self._folder.create()
            gpus = {} if self._devices is None else self._devices.types
            replace_file(self._folder.devices, json.dumps({"site": self._config.site, "gpus": gpus}) + "\n")
        except OSError as error:
            raise ConfigError(f"run.dir: {failure_message(self._folder.path, error)}") from error
        self._display.start()
        for note in notes:
            self._display.note(f"note: {note}")
        try:
            with self._signals:
                return await self._carry_out(is_resume=is_resume)
        finally:
            self._display.stop()

    async def _carry_out(self, *, is_resume: bool) -> int:
        watcher = asyncio.create_task(self._watch())
        finished: trainer_pb2.RunFinished | None = None
        problem = ""
        try:
            self._note_console(ProcessState.READY)
            session = self._session = self._make_session()
            self._helpers += [
                asyncio.create_task(session.poll()),
                asyncio.create_task(report_machine(self._config, self._launcher.addresses, self._view, self._security)),
                asyncio.create_task(self._serve_page()),
            ]
            await self._unless_interrupted(self._start(is_resume=is_resume), watcher)
            await self._begin(session, watcher)
            finished = await self._follow(session, watcher)
        except InterruptedByUserError:
            problem = "interrupted before training began"
        except TimeoutError:
            problem = f"the trainer did not stop within {STOP_WAIT_S:g} s; its last checkpoint remains"
        except (ServiceFailedError, TrainerLostError, PenstockError, FolderRefusedError) as error:
            problem = str(error)
        except OSError as error:
            problem = failure_message(self._folder.path, error)
        finally:
            await self._end([watcher, *self._helpers])
        return self._conclude(finished, self._refusal or problem)

    async def _serve_page(self) -> None:
        note, security = self._display.note, self._security
        await serve_run_page(self._config.page, self._folder, self._view, security=security, note=note)

    async def _watch(self) -> None:
        """Wait until a service is given up or the folder is full, and raise that error."""
        await race(self._launcher.services.watch(), watch_disk(self._folder.path))

    async def _start(self, *, is_resume: bool) -> None:
        self._view.phase = "starting services"
        await self._launcher.start()
        await self._await_elsewhere()
        if self._plan is not None:
            self._view.phase = "planning"
            await self._plan.create()
            self._helpers.append(asyncio.create_task(self._plan.follow()))
        if self._recorder is not None:
            self._recorder.start()
        if is_resume and self._config.endpoints.trainer is not None:
            # It describes the previous end; a trainer with the same folder writes the next one in time.
            self._folder.summary.unlink(missing_ok=True)

    async def _begin(self, session: RunSession, watcher: asyncio.Task[None]) -> None:
        """Start the run on the trainer. What it may have begun is not left to itself: `_follow` stops it."""
        self._view.phase = "starting the run on the trainer"
        starting = asyncio.create_task(session.start(resume=self.trainer_resumes))
        try:
            await self._unless_interrupted(asyncio.shield(starting), watcher)
        except InterruptedByUserError:
            self._display.note("stopping once the trainer has answered")
            await asyncio.wait({starting}, timeout=STOP_TIMEOUT_S)
            if not starting.done():
                self._display.note(
                    f"no answer in {STOP_TIMEOUT_S:g} s: a trainer that begins all the same trains until it is stopped"
                )
                raise
            await starting
        finally:
            await end(starting)

    async def _await_elsewhere(self) -> None:
        """Wait for what machines of the plan start. Raises ServiceFailedError if it does not come."""
        loop = asyncio.get_running_loop()
        for name, target in elsewhere(self._config).items():
            begun_s = loop.time()
            while problem := await service_problem(target, name, security=self._security):
                waited_s = loop.time() - begun_s
                if waited_s > MODEL_READY_S:
                    raise ServiceFailedError(f"{name} is not up after {waited_s:.0f} s: {problem}")
                self._note_wait(name, problem, waited_s, at=target)
                await asyncio.sleep(ASK_EVERY_S)

    async def _follow(self, session: RunSession, watcher: asyncio.Task[None]) -> trainer_pb2.RunFinished:
        following = asyncio.create_task(session.follow())
        try:
            return await self._unless_interrupted(asyncio.shield(following), watcher)
        except (InterruptedByUserError, FolderRefusedError) as reason:
            self._refusal = str(reason)
            self._display.note(
                "stopping: the trainer writes a checkpoint "
                f"(Ctrl-C again, {FORCE_AFTER_S:g} s from now or later, ends everything at once)"
            )
            await session.stop()
            async with asyncio.timeout(STOP_WAIT_S):
                return await following
        finally:
            await end(following)

    async def _unless_interrupted(self, work: Awaitable[_Result], watcher: asyncio.Task[None]) -> _Result:
        async def interruption() -> NoReturn:
            await self._interrupted.wait()
            raise InterruptedByUserError

        async def failure() -> NoReturn:
            await asyncio.shield(watcher)
            raise InterruptedByUserError

        return await race(work, failure(), interruption())

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        await end(*tasks)
        if self._recorder is not None:
            self._view.phase = "finishing the recording"
            await self._recorder.finish()
        scheduler = self._launcher.addresses.scheduler.target
        self._lengths = await fetch_lengths(self._config.run.id, scheduler, self._security)
        self._view.phase = "stopping services"
        await self._launcher.stop()
        if self._session is not None:
            await self._session.close()
        with contextlib.suppress(OSError):
            # If this cannot be recorded, the process being gone shows it.
            self._note_console(ProcessState.STOPPED)

    def _conclude(self, finished: trainer_pb2.RunFinished | None, problem: str) -> int:
        self._display.stop()
        is_completed = finished is not None and finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED
        if finished is not None and finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED:
            problem = problem or finished.message
        has_report = False
        try:
            has_report = self._write_results(finished)
        except OSError as error:
            problem = problem or failure_message(self._folder.path, error)
        lines = closing_lines(self._folder, finished, has_report=has_report)
        lines += self._recorder.closing_lines() if self._recorder is not None else ()
        if not is_completed and self._folder.checkpoints.is_dir() and "--resume" not in problem:
            lines.append(f"continue with: penstock run --resume {self._folder.path}")
        _print_lines(lines)
        if problem:
            print(f"penstock: {problem}", file=sys.stderr, flush=True)
        if is_completed and not problem:
            return EXIT_OK
        return EXIT_INTERRUPTED if self._interrupted.is_set() else EXIT_FAILED

    def _write_results(self, finished: trainer_pb2.RunFinished | None) -> bool:
        """Save the run's results and draw its report; returns whether there is one. Raises OSError."""
        restarts = {record.name: record.num_restarts for record in self._launcher.services.records.values()}
        if finished is not None:
            keep_results(self._folder, finished, self._view.history)
            add_to_summary(
                self._folder,
                restarts=dict(sorted(restarts.items())),
                lengths=self._lengths,
                occupancy=self._view.occupancy.document(),
                refused_chunks=self._view.refused_chunks,
            )
            self._add_advice()
        try:
            return self._folder.metrics.is_file() and write_report(self._folder)
        except OSError:
            raise
        except Exception as error:  # the run is worth more than its report
            print(f"penstock: report: {error}", file=sys.stderr, flush=True)
            return False

    def _add_advice(self) -> None:
        advice = final_advice(read_lines(self._folder.metrics), read_summary(self._folder.summary) or {})
        add_to_summary(self._folder, advice=[{"text": one.text, "numbers": dict(one.numbers)} for one in advice])

    def _make_session(self) -> RunSession:
        addresses = self._launcher.addresses

        def make_config() -> TrainingConfig:
            planned = None if self._plan is None else self._plan.trainer
            return training_config(
                self._config,
                broker=addresses.broker.target,
                critic=None if addresses.critic is None else addresses.critic.target,
                environment=addresses.environment,
                source=self._source,
                trainer=planned,
            )

        return RunSession(
            make_config,
            trainer=addresses.trainer.target,
            security=self._security,
            view=self._view,
            display=self._display,
        )

    def _make_plan(self) -> RunPlan | None:
        if self._config.scheduler.problem is None:
            return None
        return RunPlan(
            self._config,
            problem=self._config.scheduler.problem,
            scheduler=self._launcher.addresses.scheduler.target,
            history=self._folder.plans,
            security=self._security,
            note=self._display.note,
        )

    def _make_recorder(self) -> RunRecorder | None:
        record, page = self._config.record, self._config.page
        if record is False and not page.groups_per_step:
            return None
        make = partial(
            RunRecorder,
            run_id=self._config.run.id,
            broker=self._launcher.addresses.broker.target,
            security=self._security,
            note=self._display.note,
        )
        if record is False:
            path = self._folder.path / KEPT_SAMPLES
            return make(path=path, max_bytes=page.max_sample_bytes, groups_per_step=page.groups_per_step)
        return make(
            path=record if isinstance(record, Path) else self._folder.path / TRAJECTORIES,
            on_refusal=self._launcher.services.take_refusal,
            max_bytes=self._config.record_max_bytes,
        )

    def _force(self) -> None:
        # Second request: everything still running is killed. The terminal's cursor is restored first.
        self._display.stop()
        print("penstock: second signal: everything is ended at once", file=sys.stderr, flush=True)
        self._launcher.services.kill()
        os._exit(EXIT_INTERRUPTED)

    def _note_wait(self, name: str, problem: str, waited_s: float, *, at: str | None = None) -> None:
        """A service is not up yet that is started here, or `at` another machine."""
        why = f": {problem}" if problem else ""
        self._view.phase = f"starting services; waiting for {name} for {duration(waited_s)}{why}"
        is_worth_a_note = waited_s >= FIRST_WAIT_NOTE_S or problem.startswith(TLS_FAILS)
        if is_worth_a_note and name not in self._noted_waits:
            self._noted_waits.add(name)
            self._display.note(f"waiting for {name}{why} ({at or f'log: {self._folder.log_of(name)}'})")

    def _take_change(self, record: ProcessRecord) -> None:
        before = self._view.processes.get(record.name)
        self._view.processes[record.name] = record
        if before is not None and before.state == record.state:
            return
        if record.state in (ProcessState.PAUSED, ProcessState.FAILED):
            self._display.note(f"{record.name} {record.why} (log: {self._folder.log_of(record.name)})")
        elif record.state == ProcessState.RESTARTING:
            self._display.note(f"{record.name} restarted ({record.num_restarts})")
        elif before is None:
            self._display.note(f"{record.name} starts{f' on {record.address}' if record.address else ''}")
        elif record.state == ProcessState.READY and record.num_restarts == 0:
            self._display.note(f"{record.name} is up")

    def _note_console(self, state: ProcessState) -> None:
        pid = os.getpid()
        ticks = started_ticks_of(pid) or 0
        self._folder.write_record(ProcessRecord(name=CONSOLE_NAME, pid=pid, started_ticks=ticks, state=state.value))


def _print_lines(lines: Iterable[str]) -> None:
    try:
        for line in lines:
            print(line, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        # The display writes to a file on a full disk; the reason why the run ends goes to stderr.
        discard(sys.stdout)
