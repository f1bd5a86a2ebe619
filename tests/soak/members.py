"""One supervised process of the soak: started, broken, started again, and weighed with its children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.helpers.console import ROOT
from tests.helpers.processes import children_of

RESTART_DELAY_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Member:
    """A process that the soak's supervisor keeps running, as compose or systemd would."""

    def __init__(self, name: str, argv: list[str], *, log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self._argv, self._log, self._env = argv, log, dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._due_s: float | None = 0.0
        """When it is started next, monotonic; None while it runs or is not wanted."""
        self.num_starts = 0
        self.exits: list[tuple[float, int]] = []
        """Monotonic time and status of every exit that no fault caused."""
        self._was_broken = False

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return None if self._process is None else self._process.pid

    def supervise(self) -> None:
        """Notice an exit, and start it when it is due."""
        now_s = time.monotonic()
        if self._process is not None and (status := self._process.poll()) is not None:
            if not self._was_broken:
                self.exits.append((now_s, status))
            self._process, self._due_s, self._was_broken = None, now_s + RESTART_DELAY_S, False
        if self._process is None and self._due_s is not None and now_s >= self._due_s:
            self._due_s = None
            self.num_starts += 1
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(self._argv, cwd=ROOT, env=self._env, stdout=log, stderr=log)

    def kill(self, *, away_s: float = 0.0) -> None:
        """Kill it as a crash would; it is started again after `away_s`."""
        self._break(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(timeout=10)
            self._process, self._due_s, self._was_broken = None, time.monotonic() + away_s, False

    def terminate(self) -> None:
        """Ask it to drain; it is started again once it has ended."""
        self._break(signal.SIGTERM)

    def retire(self) -> None:
        """Kill it for good."""
        self.kill()
        self._due_s = None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal that does not end it."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _break(self, number: signal.Signals) -> None:
        self._was_broken = True
        self.send(number)

    def tree(self) -> list[int]:
        """It and everything it started."""
        found, waiting = [], [] if self.pid is None else [self.pid]
        while waiting:
            found.append(waiting.pop())
            waiting += children_of(found[-1])
        return found

    def weight(self) -> tuple[int, int]:
        """Resident bytes and open descriptors of its processes together."""
        resident = descriptors = 0
        for pid in self.tree():
            with suppress(OSError):
                resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
                descriptors += len(os.listdir(f"/proc/{pid}/fd"))
        return resident, descriptors
