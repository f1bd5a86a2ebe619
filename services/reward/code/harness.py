"""Calls functions of a candidate's program, inside its sandbox; runs alone, with the standard library only.

    python harness.py PROGRAM

Reads a line for each call, the Python literal of [name, arguments, keyword arguments], the latter two as literals in
turn, and answers with that of {"value": literal} or {"raised": name of the exception, "text": ...}. What the program
prints is lost. Imports next to nothing: that would be most of the CPU time of a trivial program.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> None:
    """Answer until the input ends."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    # Not `__main__`: what a program does as a script is not wanted here.
    namespace: dict[str, Any] = {"__name__": "program"}
    failed = None
    try:
        with open(sys.argv[1], encoding="utf-8") as file:
            exec(compile(file.read(), sys.argv[1], "exec"), namespace)
    except BaseException as error:
        failed = _raised(error)
    for line in requests:
        # Evaluated, not parsed: what is asked comes from outside, and no module is needed for it.
        answers.write(ascii(failed or _answer(namespace, *eval(line))) + "\n")
        answers.flush()


def _answer(namespace: "dict[str, Any]", name: str, arguments: str, keywords: str) -> dict[str, str]:
    try:
        function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
        text = repr(function(*eval(arguments), **eval(keywords)))
    except BaseException as error:
        return _raised(error)
    return {"value": text}


def _raised(error: BaseException) -> dict[str, str]:
    try:
        return {"raised": type(error).__name__, "text": str(error)[:500]}
    except BaseException:
        return {"raised": "Exception", "text": ""}


if __name__ == "__main__":
    main()
