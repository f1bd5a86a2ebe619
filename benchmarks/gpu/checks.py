"""Runs the tests that need a GPU, each file in a pytest of its own, and reads what they report.

A process of its own frees the file's GPU memory when it ends, and one that crashes costs no other file its results.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
ENGINE_FILES = ("tests/contract/engines/test_engines.py", "tests/contract/engines/test_adapters.py")
"""The contract of every engine; with the GPU build of vLLM its tests marked `vllm` run on the GPU."""
FILE_TIMEOUT_S = 2 * 3600.0
_MARK = re.compile(r"\bmark\.gpu\b")
_LOG_CHARACTERS = 300


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One test, or a file that could not be run."""

    file: str
    """Path below the root."""
    name: str
    """Of the test, with its parameters; empty for a whole file."""
    outcome: Outcome
    seconds: float
    """What it took, its preparation included."""
    reason: str = ""
    """Why it failed or was skipped, in one line."""
    figures: tuple[tuple[str, str], ...] = ()
    """What it measured."""


def files_with_checks(root: Path = ROOT) -> list[str]:
    """The files with tests marked `gpu`, and the engines' contract; paths below the root."""
    marked = (
        str(path.relative_to(root))
        for path in (root / "tests").rglob("test_*.py")
        if _MARK.search(path.read_text(encoding="utf-8"))
    )
    return sorted({*marked, *(name for name in ENGINE_FILES if (root / name).is_file())})


def run_file(file: str, *, folder: Path, root: Path = ROOT, timeout_s: float = FILE_TIMEOUT_S) -> list[Check]:
    """Run a file's tests that need a GPU; their output goes to stderr, and pytest's report into `folder`."""
    report = folder / f"{Path(file).stem}.xml"
    report.unlink(missing_ok=True)
    marks = "gpu or vllm" if file in ENGINE_FILES else "gpu"
    # Retries would hide what does not work on this machine. Only this family of reports has a test's figures.
    plugins = ("-p", "no:rerunfailures", "-p", "no:xdist", "-p", "no:cacheprovider")
    options = ("-q", *plugins, f"--junitxml={report}", "-o", "junit_family=xunit1")
    status = _run((sys.executable, "-m", "pytest", file, "-m", marks, *options), root=root, timeout_s=timeout_s)
    if not report.is_file():
        how = "took too long" if status is None else f"ended with status {status}"
        return [_failed_file(file, f"pytest {how} before it had a report")]
    checks = list(read_report(report, file))
    if status not in (0, 1, 5) and not any(check.outcome is Outcome.FAILED for check in checks):
        checks.append(_failed_file(file, f"pytest ended with status {status}"))
    return checks


def read_report(report: Path, file: str) -> Iterator[Check]:
    """The tests in a JUnit file of pytest."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        skipped = case.find("skipped")
        outcome = Outcome.FAILED if problem is not None else Outcome.SKIPPED if skipped is not None else Outcome.PASSED
        told = problem if problem is not None else skipped
        yield Check(
            file=file,
            name=case.get("name", ""),
            outcome=outcome,
            seconds=float(case.get("time", "0")),
            reason="" if told is None else _one_line(told.get("message", "")),
            figures=tuple((one.get("name", ""), one.get("value", "")) for one in case.iter("property")),
        )


def is_good(checks: Iterable[Check]) -> bool:
    """Whether something was checked, and nothing failed."""
    outcomes = {check.outcome for check in checks}
    return Outcome.FAILED not in outcomes and Outcome.PASSED in outcomes


def _run(command: Sequence[str], *, root: Path, timeout_s: float) -> int | None:
    """The exit status, or None if it took too long: its whole group is then killed, engines included."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
    with subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    ) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


def _failed_file(file: str, reason: str) -> Check:
    return Check(file=file, name="", outcome=Outcome.FAILED, seconds=0.0, reason=reason)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LOG_CHARACTERS]
