"""Implements a custom reward model: right answers earn one, minus a penalty for length.

Serve it:              python brevity.py                      (or: penstock reward serve brevity:brevity)
See that it conforms:  penstock reward check 127.0.0.1:7310
Train with it:         penstock run CONFIG.yaml reward=grpc://127.0.0.1:7310

Without a separate process, in the folder of this file:  penstock run CONFIG.yaml reward=brevity:brevity
"""

import sys
from collections.abc import Sequence

from penstock.rewards import RewardResult, Turn, serve

MAX_PENALTY = 0.2
FREE_CHARACTERS = 400


def brevity(completion: str, completion_turns: Sequence[Turn], answer: str) -> RewardResult | None:
    """One for the right final line, minus up to 0.2 for length; no verdict if the data has no answer.

    Of a sample that talked with an environment `completion` has the model's words alone, and `completion_turns` all.
    """
    if not answer:
        return None
    lines = completion.strip().splitlines() or [""]
    correct = float(lines[-1].removeprefix("####").strip() == answer.strip())
    penalty = MAX_PENALTY * min(1.0, len(completion) / FREE_CHARACTERS)
    turns = float(sum(turn.role == "assistant" for turn in completion_turns))
    return RewardResult(correct - penalty, {"correct": correct, "penalty": penalty, "turns": turns})


if __name__ == "__main__":
    serve(brevity, listen=sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7310")
