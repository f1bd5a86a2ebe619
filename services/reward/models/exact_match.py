"""1 when the completion's final answer is the reference answer, 0 when it is different or missing."""

from __future__ import annotations

from penstock.rewards import RewardItem, UnscorableError
from services.reward.models.answers import final_answer, normalised


def exact_match(item: RewardItem) -> float:
    """Compare final answers as normalised text. Raises UnscorableError for a row without a reference answer."""
    answer = item.answer
    if not answer.strip():
        raise UnscorableError("this row has no reference answer, which exact_match needs")
    # A reference may be written like a worked solution, as in GSM8K; only its final answer counts then.
    reference = final_answer(answer) if "####" in answer or "\\boxed{" in answer else answer
    given = final_answer(item.completion)
    return float(given is not None and normalised(given) == normalised(reference or answer))
