"""Finds the program in a completion, in time linear in its length."""

from __future__ import annotations

MAX_PROGRAM_CHARACTERS = 256 * 1024
_FENCE = "```"
_BLANKS = " \t"


def program_of(completion: str) -> str | None:
    """The last fenced block of code, or everything where there is no fence; None if that is no program.

    An open fence without an end is a program that was cut off, and none.
    """
    text = _last_block(completion)
    return text if text.strip() and len(text) <= MAX_PROGRAM_CHARACTERS and "\0" not in text else None


def _last_block(completion: str) -> str:
    """What the last closed fence holds; everything without a fence, and nothing if none is closed."""
    lines = completion.split("\n")
    opened: int | None = None
    block: tuple[int, int] | None = None
    for number, line in enumerate(lines):
        stripped = line.strip(_BLANKS)
        if opened is not None:
            if stripped == _FENCE:
                block, opened = (opened + 1, number), None
        elif stripped.startswith(_FENCE) and "`" not in stripped[len(_FENCE) :] and number < len(lines) - 1:
            opened = number
    if block is not None:
        return "".join(f"{line}\n" for line in lines[slice(*block)])
    return "" if any(line.lstrip(_BLANKS).startswith(_FENCE) for line in lines) else completion
