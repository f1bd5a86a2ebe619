"""Finds the program in a completion."""

from __future__ import annotations

import re

MAX_PROGRAM_CHARACTERS = 256 * 1024
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_OPEN_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)


def program_of(completion: str) -> str | None:
    """The last fenced block of code, or everything where there is no fence; None if that is no program.

    An open fence without an end is a program that was cut off, and none.
    """
    blocks = _FENCED.findall(completion)
    text = blocks[-1] if blocks else "" if _OPEN_FENCE.search(completion) else completion
    return text if text.strip() and len(text) <= MAX_PROGRAM_CHARACTERS and "\0" not in text else None
