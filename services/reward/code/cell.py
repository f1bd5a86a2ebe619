"""Runs programs against tests, one after another; a child process that the reward kills when it does not answer.

Reads a line for each program and answers with one: JSON of `Job` and `Verdict`. Sandboxes are made here and nowhere
else: whatever goes wrong with one costs this process.
"""

from __future__ import annotations

import ast
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.reward.code.exchange import LimitError, converse
from services.reward.code.row_tests import RowTests
from services.reward.code.sandboxes.finding import python_folders, sandbox_of_cell
from services.reward.code.sandboxes.sandbox import Limits, Place, Running, Sandbox, SandboxError, put
from services.reward.code.suites import Assertions, Calls, Streams, Suite, same_output, same_result
from services.reward.code.talk import UNREADABLE, Talk, literal

_SUITES: dict[str, type[Suite]] = {"streams": Streams, "calls": Calls, "assertions": Assertions}
PROGRAM_FILE = "program.py"
_KINDS = {kind: name for name, kind in _SUITES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program and its tests."""

    program: str
    suite: Suite
    command: Sequence[str]
    readable: Sequence[str]
    limits: Limits
    stops_early: bool
    """Whether the first failed test ends it."""

    def to_json(self) -> dict[str, Any]:
        """As one message."""
        return {**asdict(self), "kind": _KINDS[type(self.suite)]}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Job:
        """Of such a message."""
        suite = _SUITES[found.pop("kind")](**found.pop("suite"))
        return cls(suite=suite, limits=Limits(**found.pop("limits")), **found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a program did."""

    num_tests: int = 0
    num_passed: int = 0
    limit: str = ""
    """Which limit it exceeded, in one of the tests at least; empty if none."""
    invalid: str = ""
    """Why the tests cannot be run, whatever the program."""
    error: str = ""
    """What is wrong with the sandbox: nothing else counts then."""


def main() -> None:
    """Answer until standard input ends, which it does when the parent dies."""
    answers, sys.stdout = sys.stdout, sys.stderr
    wanted, folder = sys.argv[1:]
    tempfile.tempdir = folder
    with contextlib.ExitStack() as ended:
        sandbox: Sandbox | None = None
        row_tests: RowTests | None = None
        for line in sys.stdin:
            try:
                # Each time, because machines clear what is old; some sandboxes run programs as another user.
                Path(folder).mkdir(mode=0o755, exist_ok=True)
                if sandbox is None or row_tests is None:
                    sandbox = sandbox_of_cell(wanted)
                    row_tests = RowTests(sandbox)
                    ended.callback(row_tests.close)
                verdict = run(Job.from_json(json.loads(line)), sandbox, row_tests)
            except SandboxError as error:
                verdict = Verdict(error=str(error))
            except OSError as error:
                verdict = Verdict(error=f"{type(error).__name__}: {error}")
            answers.write(json.dumps(asdict(verdict)) + "\n")
            answers.flush()


def run(job: Job, sandbox: Sandbox, row_tests: RowTests) -> Verdict:
    """Run all tests. Raises SandboxError, OSError: nothing is known about the program."""
    with tempfile.TemporaryDirectory(prefix="penstock-code-") as folder:
        place = Place(folder=Path(folder), readable=[*python_folders(), *job.readable])
        # Some sandboxes run programs as another user.
        place.folder.chmod(0o755)
        put(place.folder / PROGRAM_FILE, job.program.encode("utf-8", "replace"))
        stage = _Stage(job, sandbox, row_tests, place)
        match job.suite:
            case Streams():
                tests = stage.streams(job.suite)
            case Calls():
                tests = stage.calls(job.suite)
            case Assertions():
                tests = stage.assertions(job.suite)
        return _tally(tests, job.suite.num_tests, stops_early=job.stops_early)


@dataclass(frozen=True, slots=True)
class _Test:
    """The outcome of one test."""

    passed: bool
    limit: str = ""
    invalid: str = ""


def _tally(tests: Generator[_Test, None, None], num_tests: int, *, stops_early: bool) -> Verdict:
    num_passed, limit = 0, ""
    with contextlib.closing(tests):
        for test in tests:
            if test.invalid:
                return Verdict(num_tests=num_tests, invalid=test.invalid)
            num_passed += test.passed
            limit = limit or test.limit
            if stops_early and not test.passed:
                break
    return Verdict(num_tests=num_tests, num_passed=num_passed, limit=limit)


class _Stage:
    """One program in its folder."""

    def __init__(self, job: Job, sandbox: Sandbox, row_tests: RowTests, place: Place) -> None:
        self._job, self._sandbox, self._row_tests, self._place = job, sandbox, row_tests, place

    def streams(self, suite: Streams) -> Generator[_Test, None, None]:
        """The program as a script, once for each input."""
        limits = self._job.limits
        for given, expected in zip(suite.inputs, suite.outputs, strict=True):
            with self._started([*self._job.command, PROGRAM_FILE]) as running:
                deadline_s = time.monotonic() + limits.wall_s
                try:
                    sent = given.encode("utf-8", "replace")
                    printed = converse(
                        running.stdin, running.stdout, sent, deadline_s=deadline_s, max_bytes=limits.output_bytes
                    )
                except LimitError as error:
                    yield _Test(passed=False, limit=str(error))
                    continue
                ended = running.wait(deadline_s - time.monotonic())
                is_same = same_output(printed.decode("utf-8", "replace"), expected)
                yield _Test(passed=ended.succeeded and is_same, limit=ended.limit)

    def calls(self, suite: Calls) -> Generator[_Test, None, None]:
        """The program as a module, whose function is called."""
        with self._started(self._harness()) as running, self._talk(running) as program:
            for arguments, expected in zip(suite.arguments, suite.results, strict=True):
                answer = program.ask([suite.function, repr(arguments), "{}"])
                yield _Test(passed="value" in answer and _is_result(answer["value"], expected), limit=program.limit)

    def assertions(self, suite: Assertions) -> Generator[_Test, None, None]:
        """The program as a module, and the tests in a sandbox of their own."""
        # All at once: the tests' sandbox is kept only if its answers were read to the end.
        yield from self._asserted(suite)

    def _asserted(self, suite: Assertions) -> list[_Test]:
        tests: list[_Test] = []
        job = self._job
        with (
            self._started(self._harness()) as running,
            self._row_tests.begun(command=job.command, readable=self._place.readable, limits=job.limits) as driver,
            self._talk(running) as program,
        ):
            message: Any = {**asdict(suite), "stops_early": job.stops_early}
            while "done" not in (answer := driver.ask(message)) and len(tests) < suite.num_tests:
                if "call" not in answer:
                    tests.append(_Test(passed=answer.get("passed") is True, limit=program.limit or driver.limit))
                    if not answer:
                        break
                    # The next one is started by itself, without a word.
                    message = None
                    continue
                if no_data := [text for text in answer["call"][1:] if literal(text) is None]:
                    return [_Test(passed=False, invalid=f"a test passes {no_data[0][:80]}, which is no data")]
                message = _checked(program.ask(answer["call"]))
        return tests

    @contextlib.contextmanager
    def _started(self, argv: Sequence[str]) -> Iterator[Running]:
        running = self._sandbox.start(argv, place=self._place, limits=self._job.limits)
        try:
            yield running
        finally:
            running.end()

    @contextlib.contextmanager
    def _talk(self, running: Running) -> Iterator[Talk]:
        talk = Talk(running, self._job.limits)
        try:
            yield talk
        finally:
            talk.close()

    def _harness(self) -> list[str]:
        return [*self._own("harness.py"), PROGRAM_FILE]

    def _own(self, name: str) -> list[str]:
        """The command for a file of ours, which is put beside the program."""
        own = f"_penstock_{name}"
        put(self._place.folder / own, Path(__file__).with_name(name).read_bytes())
        return [*self._job.command, own]


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """A program's answer if it is one, by whatever part of it that was written; else that it has ended.

    A value is written anew from what was read: it is evaluated where the tests run.
    """
    if (value := literal(answer.get("value"))) is not None:
        return {"value": value}
    if isinstance(answer.get("raised"), str) and isinstance(answer.get("text"), str):
        return {"raised": answer["raised"], "text": answer["text"]}
    return {"ended": True}


def _is_result(text: object, expected: object) -> bool:
    """Whether a literal that a program returned is what was expected, tuples being lists as in JSON."""
    try:
        return isinstance(text, str) and same_result(json.loads(json.dumps(ast.literal_eval(text))), expected)
    except UNREADABLE:
        return False


if __name__ == "__main__":
    main()
