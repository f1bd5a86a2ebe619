"""Child process of the `math` reward: one JSON request a line in, one JSON answer a line out.

Symbolic comparison can run forever or fill the memory on a hostile expression, in C code that no signal interrupts. A
process of its own can be killed, and its memory is limited here.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

MAX_MEMORY_BYTES = 4 * 1024**3
MAX_CPU_S = 3.0


def main() -> None:
    """Answer requests until stdin ends, which it does when the parent dies."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            _reply(answers, judge(**json.loads(line)))
        except MemoryError:
            _reply(answers, {"limit": f"to compare its expression took more than {MAX_MEMORY_BYTES >> 30} GiB"})


def judge(*, completion: str, answer: str) -> dict[str, Any]:
    """The verdict.

    Returns: `{"value": 0 or 1}`; `{"invalid": why}` when the reference answer is no mathematical expression, or one
    that cannot be read in time; `{"limit": why}` when the completion's cannot.
    """
    from math_verify import parse, verify

    try:
        with _limited():
            reference = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    except _LimitError as error:
        return {"invalid": f"the reference answer {answer!r:.80} takes {error}"}
    if not reference:
        return {"invalid": f"the reference answer {answer!r:.80} is no mathematical expression"}
    try:
        with _limited():
            given = parse(completion, parsing_timeout=None)
            return {"value": int(bool(given) and bool(verify(reference, given, timeout_seconds=None)))}
    except _LimitError as error:
        return {"limit": f"to compare its expression takes {error}"}


class _LimitError(BaseException):
    """Not an Exception: the library takes those for answers that are wrong."""

    def __init__(self) -> None:
        super().__init__(f"more than {MAX_CPU_S:g} s of CPU time")


@contextmanager
def _limited() -> Iterator[None]:
    """Raises _LimitError inside once MAX_CPU_S are used up.

    The library's own limits are of wall time, by which right answers are wrong on a busy machine.
    """

    def stop(_signal: int, _frame: object) -> None:
        raise _LimitError

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _reply(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
