"""1 when the completion's final number is the reference number within a tolerance."""

from __future__ import annotations

import math

from penstock.rewards import RewardItem, UnscorableError
from services.reward.models.answers import final_answer, last_number

DEFAULT_TOLERANCE = 1e-6
TOLERANCE_COLUMN = "tolerance"
# A longer run of digits is no answer, and slow to read.
_MAX_NUMBER_CHARACTERS = 400


def numeric(item: RewardItem) -> float:
    """Compare final numbers, with a relative and absolute tolerance that the data column `tolerance` may set.

    Raises UnscorableError for a row whose reference answer holds no number or whose tolerance is none.
    """
    reference = read_number(final_answer(item.answer) or item.answer)
    if reference is None:
        raise UnscorableError(f"the reference answer {item.answer!r:.80} holds no number, which numeric needs")
    given = read_number(final_answer(item.completion) or "")
    if given is None:
        return 0.0
    tolerance = _tolerance(item)
    return float(math.isclose(given, reference, rel_tol=tolerance, abs_tol=tolerance))


def read_number(text: str) -> float | None:
    """The last number in `text`: decimals, exponents, thousands with commas, fractions a/b; None when there is none."""
    written = last_number(text)
    if written is None or len(written) > _MAX_NUMBER_CHARACTERS:
        return None
    numerator, slash, denominator = written.replace(",", "").partition("/")
    try:
        value = float(numerator) / float(denominator) if slash else float(numerator)
    except (ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _tolerance(item: RewardItem) -> float:
    tolerance = item.metadata.get(TOLERANCE_COLUMN, DEFAULT_TOLERANCE)
    if isinstance(tolerance, int | float) and 0 <= tolerance < math.inf:
        return float(tolerance)
    raise UnscorableError(f"the column tolerance must be a number >= 0, got {tolerance!r:.80}")
