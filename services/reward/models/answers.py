"""Finds the final answer in a completion, and normalises it for comparison."""

from __future__ import annotations

import re
from functools import partial

_BOXED = "\\boxed{"
_ANSWER_LINE = re.compile(r"(?i)\banswer(?:\s+is)?\s*[:=]\s*(.+)")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def final_answer(completion: str) -> str | None:
    r"""The final answer as written, or None when there is none.

    The first of these that occurs decides, each at its last occurrence: the text behind `####`, the content of
    `\boxed{}`, the text behind `Answer:` (also `answer is:`), the text behind `=`, and else the last number.
    """
    for find in (partial(_behind, "####"), _boxed, partial(_last, _ANSWER_LINE), partial(_behind, "="), last_number):
        found = find(completion)
        if found is not None:
            return found.strip()
    return None


def normalised(answer: str) -> str:
    """`answer` without what does not change its meaning: case, spaces, a final stop, `$`, commas between thousands."""
    text = answer.strip().strip("$").strip().rstrip(".").casefold()
    return "".join(_THOUSANDS.sub("", text).split()).removeprefix("+")


def last_number(text: str) -> str | None:
    """The last number in `text` as written, or None."""
    return _last(_NUMBER, text)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return found[-1] if found else None


def _behind(mark: str, text: str) -> str | None:
    _, found, answer = text.rpartition(mark)
    # The rest of a completion that went on after its answer is no part of the answer.
    return "".join(answer.strip().splitlines()[:1]) if found else None


def _boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    begin = start + len(_BOXED)
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None
