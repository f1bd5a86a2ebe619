"""Draws the lengths of the warm start's answers to the quick start's problems, for `penstock bench ranker`.

A token is a character; the end of the answer is one more. An answer's length follows from the number of terms, which
the prompt shows, and from the slips, which are unpredictable: the oracle is the mean over many answers.
"""

from __future__ import annotations

import random

import numpy as np

from benchmarks.ranker.suite import DataSet
from quickstart.arithmetic import sample_distinct_problems, write_working
from quickstart.warm_start import WarmStartSettings
from services.scheduler.lengths.prompt_features import make_prompt

_GROUP_SIZE, _ORACLE_DRAWS = 8, 64


def quickstart_data(*, seed: int, num_prompts: int) -> DataSet:
    """Training problems and the lengths of their worked answers, in tokens."""
    rng = random.Random(seed)
    slip_probability = WarmStartSettings().slip_probability
    problems = sample_distinct_problems(rng, held_out=False, num_problems=num_prompts)
    drawn = np.array(
        [
            [
                len(write_working(problem, rng=rng, slip_probability=slip_probability)) + 1.0
                for _ in range(_GROUP_SIZE + _ORACLE_DRAWS)
            ]
            for problem in problems
        ]
    )
    ids = [np.frombuffer(problem.prompt.encode(), np.uint8).astype(np.uint32) for problem in problems]
    prompts = [make_prompt(each, "") for each in ids]
    return DataSet(prompts=prompts, lengths=drawn[:, :_GROUP_SIZE], oracle=drawn[:, _GROUP_SIZE:].mean(axis=1))
