"""Child processes that measure: each has a time limit, and none outlives this process.

A child is one of this folder's workers. It writes its answer as it goes, so that what it had measured when its time ran
out still counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from console.launch.supervisor import last_line, service_environment

_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What children answered."""

    answers: tuple[Mapping[str, Any], ...]
    """The newest answer of each, in order; empty for one that had none."""
    problem: str
    """Why not all of them ended well, in one line; empty if they did."""


def run_children(
    worker: str,
    settings: Sequence[Mapping[str, Any]],
    *,
    num_threads: int,
    environment: Mapping[str, str],
    limit_s: float,
) -> Outcome:
    """Run a worker with each of the settings at once, and wait for all; the first that fails ends the others.

    Args:
        worker: The worker's module in this folder.
        settings: A JSON object for each child.
        num_threads: CPU threads of each.
        environment: Variables to add.
        limit_s: Time until those that still run are killed.
    """
    variables = {**service_environment(os.environ, num_threads=num_threads), **environment}
    with TemporaryDirectory(prefix="penstock-probe-") as name:
        folder = Path(name)
        answers = [folder / f"answer-{index}.json" for index in range(len(settings))]
        logs = [folder / f"log-{index}.txt" for index in range(len(settings))]
        children: list[subprocess.Popen[bytes]] = []
        with _killed_at_the_end(children):
            for stated, answer, log in zip(settings, answers, logs, strict=True):
                arguments = json.dumps({**stated, "folder": name, "answer": str(answer), "parent_pid": os.getpid()})
                command = (sys.executable, "-P", "-m", f"console.probe.{worker}", arguments)
                with log.open("wb") as output:
                    children.append(
                        subprocess.Popen(
                            command, stdout=output, stderr=output, env=variables, start_new_session=True, cwd=name
                        )
                    )
            failed = _wait(children, limit_s)
        problem = ""
        if failed is not None:
            status = children[failed].returncode
            said = last_line(logs[failed])
            # A killed child of ours had run out of time.
            late = f"did not end within {limit_s:.0f} s"
            problem = late if status == -signal.SIGKILL else said or f"ended with status {status}"
        return Outcome(answers=tuple(map(_read, answers)), problem=problem)


def _wait(children: Sequence[subprocess.Popen[bytes]], limit_s: float) -> int | None:
    """Index of the first child that failed or is late; None if all ended well."""
    end_s = time.monotonic() + limit_s
    while True:
        statuses = [child.poll() for child in children]
        if any(statuses):
            return next(index for index, status in enumerate(statuses) if status)
        if None not in statuses:
            return None
        if time.monotonic() > end_s:
            return statuses.index(None)
        time.sleep(_POLL_S)


@contextmanager
def _killed_at_the_end(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for child in children:
            # The group: an engine starts processes of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
