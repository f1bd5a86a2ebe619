"""Manages the supervised processes of one folder: a run and a machine of a plan start and end services through it.

Invariants:
- The folder's process records are current, so that `penstock ps` and `stop` need no help from this process.
- `watch` raises when a service is given up and no other of its kind is left, and when the disk refuses logs or
  records.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from console.config.derive import write_config
from console.config.run_folder import ProcessRecord, RunFolder
from console.config.sections import LogSection
from console.launch.disk_watch import FolderRefusedError
from console.launch.metrics_targets import MetricsTargets
from console.launch.probes import service_problem
from console.launch.supervisor import (
    ProcessState,
    ServiceFailedError,
    ServiceSpec,
    SupervisedProcess,
    console_argv,
    service_environment,
)
from penstock.config import MeasuredConfig
from penstock.process.disk import failure_message
from penstock.process.grace_periods import STOP_GRACE_S
from penstock.process.tasks import end
from penstock.security import Security

_PROBE_S = 2.0
_LOOK_S = 0.5
_NOT_NEEDED = ("scheduler",)
"""Services that a run can continue without."""


class ServiceProcesses:
    """The supervised processes of a folder, by name."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        security: Security,
        log: LogSection,
        on_change: Callable[[ProcessRecord], None] = lambda record: None,
        on_wait: Callable[[str, str, float], None] = lambda name, problem, waited_s: None,
        pauses: bool = True,
        targets: Path | None = None,
        machine: str = "",
    ) -> None:
        """Without `pauses`, the first service that dies too often ends `watch`.

        `targets` is where Prometheus reads what serves metrics; if None, as `MetricsTargets` finds it. `machine` is the
        one that these run on, where others of the same names run on other ones: their logs and spans begin with it.

        `on_wait` is called now and then while `wait_ready` waits for a service: its name, why, and for how long.
        """
        self.records: dict[str, ProcessRecord] = {}
        self._folder = folder
        self._security = security
        self._log = log
        self._on_change = on_change
        self._pauses = pauses
        self._machine = machine
        self._targets = MetricsTargets(folder, targets)
        self._problems: dict[str, str] = {}
        """Why services are not up, by name."""
        self._on_wait = on_wait
        self._processes: dict[str, SupervisedProcess] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._given_up = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def names(self) -> list[str]:
        """Names of the processes being kept running."""
        return list(self._processes)

    def launch_service(
        self,
        kind: str,
        settings: MeasuredConfig,
        *,
        name: str,
        target: str,
        num_threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `penstock serve kind` with these settings; its health at `target` shows when it is up.

        One without a target serves nothing, and counts as up at once. Others serve their metrics, too: on a port of
        loopback unless the settings name a place.
        """
        metrics = self.metrics_address(name, settings.metrics_address) if target else ""
        settings = settings.model_copy(update={"metrics_port": None, "metrics_listen": metrics or None})
        path = self._folder.services / f"{name}.yaml"
        write_config(settings, path)
        full_name = f"{self._machine}-{name}" if self._machine else name

        async def is_ready() -> bool:
            if not target:
                return True
            problem = await service_problem(target, kind, security=self._security, timeout_s=_PROBE_S)
            self._problems[name] = problem or ""
            return problem is None

        self.launch(
            ServiceSpec(
                name=name,
                kind=kind,
                argv=console_argv("serve", kind, "--config", str(path), "--name", full_name, *log_options(self._log)),
                address=target,
                metrics=metrics,
                env=service_environment({**os.environ, **(environment or {})}, num_threads=num_threads),
                log_path=self._folder.log_of(name),
                is_ready=is_ready,
                stop_grace_s=STOP_GRACE_S[kind],
            )
        )

    def metrics_address(self, name: str, stated: str | None = None) -> str:
        """Where a service is to serve its metrics until it is stopped; see `MetricsTargets.address_of`."""
        return self._targets.address_of(name, stated)

    def launch(self, spec: ServiceSpec, *, serves_tls: bool | None = None) -> None:
        """Start a process and keep it running.

        Args:
            spec: What to start.
            serves_tls: Whether its metrics are served over TLS; None: as this process's credentials say.
        """
        if spec.metrics:
            tls = self._security.serves_tls if serves_tls is None else serves_tls
            with self._noting_refusals():
                self._targets.add(spec.name, spec.kind, spec.metrics, serves_tls=tls)
        process = SupervisedProcess(spec, on_change=self._note, on_refused_write=self.take_refusal, pauses=self._pauses)
        self._processes[spec.name] = process
        task = self._tasks[spec.name] = asyncio.create_task(process.run(), name=spec.name)
        task.add_done_callback(self._take_end)

    async def wait_ready(self, name: str, *, timeout_s: float) -> None:
        """Wait until it is up. Raises ServiceFailedError if it is paused or given up, or not up in time."""
        process, task = self._processes[name], self._tasks[name]
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        waiter = asyncio.create_task(process.ready.wait())
        try:
            while loop.time() - begun_s < timeout_s and process.state != ProcessState.PAUSED:
                done, _ = await asyncio.wait({waiter, task}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
                self._on_wait(name, self._problems.get(name, ""), loop.time() - begun_s)
        finally:
            await end(waiter)
        if task.done():
            task.result()
        if process.state == ProcessState.PAUSED:
            raise ServiceFailedError(f"{name} {self.records[name].why} (log: {self._folder.log_of(name)})")
        if not process.ready.is_set():
            problem = self._problems.get(name) or "it does not answer"
            raise ServiceFailedError(
                f"{name} is not up after {timeout_s:g} s: {problem} (log: {self._folder.log_of(name)})"
            )

    async def watch(self) -> None:
        """Wait until the last service of a kind is given up, or the folder is full, and raise the reason.

        Raises ServiceFailedError, FolderRefusedError. A paused service does not count as given up.
        """
        await self._given_up.wait()
        if self._failure is not None:
            raise self._failure

    async def stop(self, names: Iterable[str], *, within_s: float | None = None) -> None:
        """Stop the running processes of these names, concurrently, and forget them; `within_s` as of one process."""
        stopped = [name for name in names if name in self._processes]
        with self._noting_refusals():
            self._targets.remove(stopped)
        await asyncio.gather(*(self._processes[name].stop(within_s=within_s) for name in stopped))
        tasks = [self._tasks.pop(name) for name in stopped]
        for name in stopped:
            del self._processes[name]
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """End everything at once, without waiting for it."""
        with self._noting_refusals():
            self._targets.clear()
        for process in self._processes.values():
            process.kill()

    def _take_end(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        process = self._processes.get(task.get_name())
        if failure is None or process is None:
            return
        kind = process.spec.kind or process.spec.name
        others = [other for other in self._processes.values() if kind in (other.spec.kind, other.spec.name)]
        is_last = all(other.state == ProcessState.FAILED for other in others)
        if (is_last and kind not in _NOT_NEEDED) or not self._pauses:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
            self._given_up.set()

    def take_refusal(self, error: OSError, path: Path | None = None) -> None:
        """A write to the folder failed, or to `path`, which may be elsewhere: `watch` raises that."""
        self._fail(FolderRefusedError(failure_message(self._folder.path, error, refused=path)))

    @contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.take_refusal(error, self._targets.path)

    def _note(self, record: ProcessRecord) -> None:
        self.records[record.name] = record
        try:
            self._folder.write_record(record)
        except OSError as error:
            self.take_refusal(error)
        self._on_change(record)


def log_options(log: LogSection) -> tuple[str, ...]:
    """Options for how a service writes its log."""
    return ("--log-level", log.level, "--log-format", log.format)
