"""Runs a row's assertions, in a sandbox of its own; runs alone, with the standard library only.

Reads one line, the Python literal of {"setup", "tests", "functions"}, and prints that of a dictionary for each test,
{"passed": True or False}. The functions are not here but with the candidate's program: a call is printed as
{"call": ...}, and the next line is its answer, as `harness` has them. Values that come back are data, never objects of
the program, so that nothing of it runs here: `cell` has read them, and writes them anew. So they are evaluated, not
parsed: to import a parser would take as much CPU time as Python's start.
"""

import builtins
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Ended(BaseException):
    """The program has ended; no test that expects an error takes this for it."""


def main() -> None:
    """Run all tests."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)

    def ask(message: "dict[str, Any]") -> "Any":
        answers.write(ascii(message) + "\n")
        answers.flush()
        line = requests.readline()
        if not line:
            raise Ended
        return _read(line)

    task = _read(requests.readline())
    namespace: dict[str, Any] = {"__name__": "tests"}
    namespace.update({name: _proxy(name, ask) for name in task["functions"]})
    outcome = _run(task["setup"], namespace)
    for test in task["tests"]:
        tested = outcome if outcome != {"passed": True} else _run(test, namespace)
        answers.write(ascii(tested) + "\n")
        answers.flush()


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
