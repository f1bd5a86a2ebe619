"""Child process of the reward `reasoning_gym`: relays to the package's scorer in a sandbox, one line for another.

Sandboxes are made here and nowhere else: whatever goes wrong with one costs this process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import Any

from penstock.reasoning_gym.rows import WORKER, import_folders
from services.reward.code.exchange import LimitError, Lines, send
from services.reward.code.sandboxes.finding import python_folders, sandbox_of_cell
from services.reward.code.sandboxes.sandbox import Limits, Place, Running, Sandbox, SandboxError

SCORE_TIMEOUT_S = 15.0
START_TIMEOUT_S = 60.0
_LIMITS = Limits(cpu_s=3600, wall_s=SCORE_TIMEOUT_S, memory_bytes=2 * 1024**3, max_processes=8, output_bytes=256 * 1024)


def main() -> None:
    """Answer until standard input ends, which it does when the parent dies."""
    answers, sys.stdout = sys.stdout, sys.stderr
    scorer = _Scorer(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = scorer.ask(line.encode())
        except (SandboxError, OSError, ValueError) as error:
            scorer.end()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class _Scorer:
    """The worker in its sandbox, started when it is first needed and again after it was ended."""

    def __init__(self, sandbox: str) -> None:
        self._wanted = sandbox
        self._sandbox: Sandbox | None = None
        self._running: Running | None = None

    def ask(self, line: bytes) -> dict[str, Any]:
        """Its answer, or {"limit": what scoring exceeded}. Raises SandboxError, OSError, ValueError."""
        deadline_s = time.monotonic() + SCORE_TIMEOUT_S + (START_TIMEOUT_S if self._running is None else 0.0)
        running = self._running = self._running or self._start()
        lines = Lines(running.stdout, deadline_s=deadline_s, max_bytes=_LIMITS.output_bytes)
        try:
            is_there = send(running.stdin, line, deadline_s=deadline_s)
            found = lines.next() if is_there else None
        except LimitError as error:
            self.end()
            return {"limit": str(error)}
        finally:
            lines.close()
        if found is None:
            self.end()
            return {"limit": "its memory or processes"}
        answer: dict[str, Any] = json.loads(found)
        return answer

    def end(self) -> None:
        """End the worker."""
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def _start(self) -> Running:
        if self._sandbox is None:
            self._sandbox = sandbox_of_cell(self._wanted)
        folders = import_folders()
        env = [str(shutil.which("env")), "PYTHONHASHSEED=0"]
        argv = [*env, os.path.realpath(sys.executable), "-s", "-S", str(WORKER), *folders]
        place = Place(folder=WORKER.parent, readable=[*python_folders(), *folders])
        return self._sandbox.start(argv, place=place, limits=_LIMITS)


if __name__ == "__main__":
    main()
