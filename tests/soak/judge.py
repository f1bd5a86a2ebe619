"""The soak's reward model, served by a process of its own so that it can be killed."""

from __future__ import annotations


def judge(completion: str, answer: str) -> float:
    """1 when the completion ends with the answer."""
    return float(bool(answer) and completion.strip().endswith(answer))
