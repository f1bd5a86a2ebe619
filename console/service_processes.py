"""The supervised processes of one folder: how a run and a machine of a plan start services, and end them.

Invariants:
- The folder's process records are current, so that `penstock ps` and `stop` need no help from this process.
- A service that is given up, and a disk that refuses logs or records, are told to whoever waits in `watch`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping

from console.config import LogSection
from console.derive import write_config
from console.disk_watch import FolderRefusedError
from console.folder import ProcessRecord, RunFolder
from console.probes import service_problem
from console.processes import (
    ServiceFailedError,
    ServiceSpec,
    SupervisedProcess,
    console_argv,
    service_environment,
)
from penstock.config import StrictModel
from penstock.disk import failure_message
from penstock.graces import STOP_GRACE_S
from penstock.security import Security

_PROBE_S = 2.0


class ServiceProcesses:
    """Processes by name."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        security: Security,
        log: LogSection,
        on_change: Callable[[ProcessRecord], None] = lambda record: None,
    ) -> None:
        self.records: dict[str, ProcessRecord] = {}
        self._folder = folder
        self._security = security
        self._log = log
        self._on_change = on_change
        self._processes: dict[str, SupervisedProcess] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._given_up = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def names(self) -> list[str]:
        """Names of the processes that are kept running."""
        return list(self._processes)

    def launch_service(
        self,
        kind: str,
        settings: StrictModel,
        *,
        name: str,
        target: str,
        health_service: str,
        num_threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `penstock serve kind` with these settings; `target` and `health_service` say when it is up."""
        path = self._folder.services / f"{name}.yaml"
        write_config(settings, path)

        async def is_ready() -> bool:
            return await service_problem(target, health_service, security=self._security, timeout_s=_PROBE_S) is None

        self.launch(
            ServiceSpec(
                name=name,
                argv=console_argv("serve", kind, "--config", str(path), "--name", name, *self.log_options),
                address=target,
                env=service_environment({**os.environ, **(environment or {})}, num_threads=num_threads),
                log_path=self._folder.log_of(name),
                is_ready=is_ready,
                stop_grace_s=STOP_GRACE_S[kind],
            )
        )

    @property
    def log_options(self) -> tuple[str, ...]:
        """How logs are written, as options of the command line."""
        return ("--log-level", self._log.level, "--log-format", self._log.format)

    def launch(self, spec: ServiceSpec) -> None:
        """Start a process and keep it running."""
        process = SupervisedProcess(spec, on_change=self._note, on_refused_write=self._take_refusal)
        self._processes[spec.name] = process
        task = self._tasks[spec.name] = asyncio.create_task(process.run(), name=spec.name)
        task.add_done_callback(self._take_end)

    async def wait_ready(self, name: str, *, timeout_s: float) -> None:
        """Until it is up. Raises ServiceFailedError when it is given up, or not up in time."""
        process, task = self._processes[name], self._tasks[name]
        waiter = asyncio.create_task(process.ready.wait())
        try:
            await asyncio.wait({waiter, task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
        if task.done():
            task.result()
        if not process.ready.is_set():
            raise ServiceFailedError(f"{name} is not up after {timeout_s:g} s (log: {self._folder.log_of(name)})")

    async def watch(self) -> None:
        """Wait until a service is given up or the folder takes no more: ServiceFailedError, FolderRefusedError."""
        await self._given_up.wait()
        if self._failure is not None:
            raise self._failure

    async def stop(self, names: Iterable[str]) -> None:
        """Stop those of these names that run, all at once, and forget them."""
        stopped = [name for name in names if name in self._processes]
        await asyncio.gather(*(self._processes[name].stop() for name in stopped))
        tasks = [self._tasks.pop(name) for name in stopped]
        for name in stopped:
            del self._processes[name]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def kill(self) -> None:
        """End everything at once."""
        self.kill_now()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def kill_now(self) -> None:
        """`kill` for a signal handler: does not wait."""
        for process in self._processes.values():
            process.kill()

    def _take_end(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
            self._given_up.set()

    def _take_refusal(self, error: OSError) -> None:
        self._fail(FolderRefusedError(failure_message(self._folder.path, error)))

    def _note(self, record: ProcessRecord) -> None:
        self.records[record.name] = record
        try:
            self._folder.write_record(record)
        except OSError as error:
            self._take_refusal(error)
        self._on_change(record)
