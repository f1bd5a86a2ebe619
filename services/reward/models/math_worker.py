"""Child process of the `math` reward: one JSON request a line in, one JSON answer a line out.

Symbolic comparison can run forever or fill the memory on a hostile expression, in C code that no signal interrupts. A
process of its own can be killed, and its memory is limited here.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import warnings
from typing import Any, TextIO

MAX_MEMORY_BYTES = 4 * 1024**3
SOFT_TIMEOUT_S = 3


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
    """`{"value": 0 or 1}`, or `{"invalid": why}` when the reference answer is no mathematical expression."""
    from math_verify import parse, verify

    reference = parse(answer, parsing_timeout=SOFT_TIMEOUT_S) or parse(f"${answer}$", parsing_timeout=SOFT_TIMEOUT_S)
    if not reference:
        return {"invalid": f"the reference answer {answer!r:.80} is no mathematical expression"}
    given = parse(completion, parsing_timeout=SOFT_TIMEOUT_S)
    return {"value": int(bool(given) and bool(verify(reference, given, timeout_seconds=SOFT_TIMEOUT_S)))}


def _reply(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
