"""Makes sums with written-out working: the problems that the quick start trains on.

A problem is a sum of small whole numbers, each with a letter before it. Its response adds them one at a time, on a line
each that starts with the letter, and ends with the answer after `#### `:

    prompt    a12 b7 c9=
    response  b7+12=19
              c9+19=28
              #### 28

The letters let the model find the next number by content, not by counting: a model of a million parameters learns the
first in a minute and the second in ten.

Invariants:
- Held-out problems never occur in training data. Which side a problem is on depends on its text alone, not on a seed.
- Every draw comes from the generator that is passed in: the same seed gives the same problems.
- The number of terms follows a truncated geometric law, so response lengths have a long tail.
- A slip omits a term: the written lines are right, the answer is not.
"""

import hashlib
import json
import random
import string
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ANSWER_MARKER = "#### "
MIN_TERMS = 2
MAX_TERMS = 20
MAX_FIRST_TERM = 50
MAX_TERM = 9
# Chance that a sum continues after each term: responses of 10 to about 195 tokens, 46 on average.
CONTINUE_PROBABILITY = 0.79
HELD_OUT_ONE_IN = 4
_LABELS = string.ascii_lowercase[:MAX_TERMS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One sum."""

    terms: tuple[int, ...]
    """Two or more numbers: the first up to `MAX_FIRST_TERM`, the others up to `MAX_TERM`."""

    @property
    def prompt(self) -> str:
        """The sum as text, for example `a12 b7 c9=`."""
        return " ".join(f"{label}{term}" for label, term in zip(_LABELS, self.terms, strict=False)) + "="

    @property
    def answer(self) -> str:
        """The exact result in decimal digits."""
        return str(sum(self.terms))

    @property
    def is_held_out(self) -> bool:
        """Whether the problem belongs to the evaluation side of the split."""
        digest = hashlib.sha256(self.prompt.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def sample_problem(rng: random.Random, *, held_out: bool, max_terms: int = MAX_TERMS) -> Problem:
    """Draw a problem from the given side of the split.

    Args:
        rng: Source of all randomness.
        held_out: Which side of the split to draw from.
        max_terms: Largest number of terms; a curriculum starts low.
    """
    while True:
        num_terms = MIN_TERMS
        while num_terms < max_terms and rng.random() < CONTINUE_PROBABILITY:
            num_terms += 1
        terms = [rng.randint(1, MAX_FIRST_TERM), *(rng.randint(1, MAX_TERM) for _ in range(num_terms - 1))]
        problem = Problem(terms=tuple(terms))
        if problem.is_held_out == held_out:
            return problem


def sample_distinct_problems(rng: random.Random, *, held_out: bool, num_problems: int) -> list[Problem]:
    """Draw distinct problems from one side of the split."""
    problems: dict[Problem, None] = {}
    while len(problems) < num_problems:
        problems.setdefault(sample_problem(rng, held_out=held_out))
    return list(problems)


def write_working(problem: Problem, *, rng: random.Random, slip_probability: float = 0.0) -> str:
    """Write the response to a problem: a line for each addition, then the number after `ANSWER_MARKER`.

    Args:
        problem: The sum to work out.
        rng: Decides where slips fall.
        slip_probability: Chance that a term is omitted.
    """
    lines: list[str] = []
    total = problem.terms[0]
    for label, term in zip(_LABELS[1:], problem.terms[1:], strict=False):
        if rng.random() < slip_probability:
            continue
        lines.append(f"{label}{term}+{total}={total + term}\n")
        total += term
    return "".join(lines) + f"{ANSWER_MARKER}{total}"


def extract_answer(response: str) -> str | None:
    """Return what follows the last `ANSWER_MARKER`, or None if the response has no marker."""
    _, marker, answer = response.rpartition(ANSWER_MARKER)
    return answer.strip() if marker else None


def write_rows(path: Path, problems: Iterable[Problem]) -> None:
    """Write problems as JSONL rows `{"prompt": ..., "answer": ...}`."""
    rows = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) + "\n" for problem in problems]
    path.write_text("".join(rows), encoding="utf-8")
