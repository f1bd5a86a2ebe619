"""Runs rows' assertions, in a sandbox of their own; runs alone, with the standard library only.

For each row it reads one line, whatever it says, and forks a process, which prints {"ready": True}, reads the Python
literal of {"setup", "tests", "functions", "stops_early"}, and prints that of a dictionary for each test, {"passed":
True or False}. Then follows {"done": True}; or the driver ends as that process did, if by a signal or with an error.

The functions are not here but with the candidate's program: a call is printed as {"call": ...}, and the next line is
its answer, as `harness` has them. Values that come back are data, never objects of the program, so that nothing of it
runs here: `cell` has read them, and writes them anew. So they are evaluated, not parsed: to import a parser would take
as much CPU time as Python's start.
"""

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_SIGKILL = 9
"""`signal` would be a third of the start."""


class Ended(BaseException):
    """The program has ended; no test that expects an error takes this for it."""


def main() -> None:
    """Answer until the input ends."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)

    def say(message: "dict[str, Any]") -> None:
        answers.write(ascii(message) + "\n")
        answers.flush()

    def ask(message: "dict[str, Any]") -> "Any":
        say(message)
        line = requests.readline()
        if not line:
            raise Ended
        return _read(line)

    while requests.readline():
        row = os.fork()
        if row == 0:
            status = 1
            try:
                os.setsid()
                _run_row(ask, say)
                status = 0
            finally:
                os._exit(status)
        _end_unless_succeeded(row)
        say({"done": True})


def _run_row(ask: "Callable[[dict[str, Any]], Any]", say: "Callable[[dict[str, Any]], None]") -> None:
    """All tests of a row, as the whole work of this process."""
    task = ask({"ready": True})
    namespace: dict[str, Any] = {"__name__": "tests"}
    namespace.update({name: _proxy(name, ask) for name in task["functions"]})
    outcome = _run(task["setup"], namespace)
    for test in task["tests"]:
        tested = outcome if outcome != {"passed": True} else _run(test, namespace)
        say(tested)
        if task["stops_early"] and tested != {"passed": True}:
            return


def _end_unless_succeeded(process: int) -> None:
    """Wait for a process, end those that it has left, and end as it did if that was not with success."""
    # It is left to be waited for, so that its group is still there.
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    os.killpg(process, _SIGKILL)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    if status:
        sys.exit(1)


def _run(source: str, namespace: "dict[str, Any]") -> "dict[str, Any]":
    try:
        exec(source, namespace)
    except BaseException:
        return {"passed": False}
    return {"passed": True}


def _read(literal: str) -> "Any":
    """A literal that `cell` wrote; no name but that of the empty set means anything in it."""
    return eval(literal, {"__builtins__": {"set": set}})


def _proxy(name: str, ask: "Callable[[dict[str, Any]], dict[str, Any]]") -> "Callable[..., Any]":
    def call(*arguments: object, **keywords: object) -> "Any":
        answer = ask({"call": [name, repr(arguments), repr(keywords)]})
        if "ended" in answer:
            raise Ended
        if "raised" in answer:
            raise _error(answer["raised"], answer["text"])
        try:
            return _read(answer["value"])
        except Exception:
            # Too large to be read here, or an infinite number, which has no literal.
            raise Ended from None

    call.__name__ = name
    return call


def _error(name: str, text: str) -> Exception:
    """The built-in exception of that name. One that ends a loop quietly would make tests of sequences pass."""
    kind = getattr(builtins, name, RuntimeError)
    is_error = isinstance(kind, type) and issubclass(kind, Exception)
    ends_loops = is_error and issubclass(kind, StopIteration | StopAsyncIteration)
    return (kind if is_error and not ends_loops else RuntimeError)(text)


if __name__ == "__main__":
    main()
