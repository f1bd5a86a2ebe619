"""The sandbox in which rows' assertions run: one after another, because its start takes more than trivial tests do.

Each row's tests run in a process of their own, which `driver` forks: they see nothing of each other. The sandbox is
kept only if the last ones ended by themselves and with success, and only for a while.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.reward.code.sandboxes.sandbox import Limits, Place, Running, Sandbox, SandboxError, put
from services.reward.code.talk import Talk

MAX_AGE_S = 30.0
"""A sandbox that has lived for longer takes no further tests: what earlier ones may have left there is bounded so."""
START_TIMEOUT_S = 30.0
"""Seconds within which a driver has to be ready, however little programs may take."""
_DRIVER = "driver.py"


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a sandbox was started with."""

    command: tuple[str, ...]
    readable: tuple[str, ...]
    limits: Limits


@dataclass(slots=True)
class _Kept:
    """A sandbox whose driver is running."""

    terms: _Terms
    started_s: float
    running: Running
    held: contextlib.ExitStack
    """Ends it."""

    def is_for(self, terms: _Terms) -> bool:
        """Whether tests of these terms may run in it, too."""
        return self.terms == terms and time.monotonic() - self.started_s < MAX_AGE_S


class RowTests:
    """Runs tests, those of one row at a time; `close` it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._kept: _Kept | None = None

    @contextlib.contextmanager
    def begun(self, *, command: Sequence[str], readable: Sequence[str], limits: Limits) -> Iterator[Talk]:
        """A talk with a driver that is ready for the tests of one row.

        Raises:
            SandboxError: It did not become ready, which no program can bring about.
        """
        terms = _Terms(tuple(command), tuple(readable), limits)
        kept = self._ready_kept(terms) or self._started(terms)
        talk = Talk(kept.running, limits)
        try:
            yield talk
        finally:
            talk.close()
            if "done" in talk.last:
                self._kept = kept
            else:
                kept.held.close()

    def close(self) -> None:
        """End the sandbox that is kept."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.held.close()

    def _ready_kept(self, terms: _Terms) -> _Kept | None:
        """The sandbox of earlier tests, if it is still of use."""
        kept = self._kept
        if kept is not None and kept.is_for(terms) and _is_ready(kept):
            self._kept = None
            return kept
        self.close()
        return None

    def _started(self, terms: _Terms) -> _Kept:
        with contextlib.ExitStack() as ended:
            folder = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="penstock-tests-")))
            # Some sandboxes run programs as another user.
            folder.chmod(0o755)
            put(folder / _DRIVER, Path(__file__).with_name(_DRIVER).read_bytes())
            # The driver itself is one more process than tests may have.
            limits = replace(terms.limits, max_processes=terms.limits.max_processes + 1)
            place = Place(folder=folder, readable=terms.readable)
            running = self._sandbox.start([*terms.command, _DRIVER], place=place, limits=limits)
            ended.callback(running.end)
            kept = _Kept(terms, time.monotonic(), running, ended)
            if not _is_ready(kept):
                raise SandboxError("the sandbox of a row's tests did not become ready")
            kept.held = ended.pop_all()
        return kept


def _is_ready(kept: _Kept) -> bool:
    """Whether the driver has a process for the tests of a row."""
    talk = Talk(kept.running, replace(kept.terms.limits, wall_s=START_TIMEOUT_S))
    try:
        return "ready" in talk.ask("begin")
    finally:
        talk.close()
