"""Makes a synthetic long-tail data set: StreamRL's lengths, and difficulty that a prompt shows only in part.

A prompt is a task inside a story. The answer's length depends on the task's subject (each of 40 has its own
difficulty), the question about it (ten kinds, which are harder for some families of subjects than for others), the
number of added conditions, and the size of the number in it. The story makes the prompt long without any information. A
further part of the difficulty is hidden. Difficulty is mapped to lengths by rank, so that lengths follow the histogram
of StreamRL's Figure 7 whatever the difficulty's distribution.

The oracle knows the shown difficulty itself. Length rises with shown + hidden, and hidden is independent of shown, so
no forecast from the prompt ranks better: it is computed, not estimated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.dispatch.scenarios import histogram_quantile
from services.scheduler.lengths.prompt_features import PromptView, make_prompt

SHOWN_SHARE = 0.983
"""Correlation of a prompt's shown difficulty with the whole; with it the oracle finds 0.9 of the longest fifth."""
_NUM_SUBJECTS, _NUM_FAMILIES, _NUM_ASKS, _NUM_CONDITIONS = 40, 5, 10, 4
_NUM_STORY_WORDS, _MAX_CONDITIONS = 300, 6
_FIRST_TASK_ID = 1000
"""First token id of task words; story words come below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePrompt:
    """A prompt and its true properties."""

    prompt: PromptView
    shown: float
    """Difficulty that the prompt shows; the oracle's forecast, without a unit."""
    length: int
    """Length of its completion in tokens."""


def make_set(*, seed: int, num_prompts: int, shown_share: float = SHOWN_SHARE) -> list[MadePrompt]:
    """Prompts as token ids, with lengths; deterministic in the seed."""
    rng = random.Random(seed)
    task = _Task(rng)
    drawn = [task.draw(rng) for _ in range(num_prompts)]
    shown = np.array([difficulty for _, difficulty in drawn])
    shown = (shown - shown.mean()) / shown.std()
    hidden_share = math.sqrt(1.0 - shown_share**2)
    hidden = np.array([rng.gauss(0.0, 1.0) for _ in drawn])
    lengths = _ranked_lengths(shown_share * shown + hidden_share * hidden)
    return [
        MadePrompt(prompt=make_prompt(np.array(ids, dtype=np.uint32), ""), shown=float(level), length=length)
        for (ids, _), level, length in zip(drawn, shown, lengths, strict=True)
    ]


def _ranked_lengths(difficulty: npt.NDArray[np.float64]) -> list[int]:
    ranks = (difficulty.argsort().argsort() + 0.5) / len(difficulty)
    return [round(histogram_quantile(float(rank))) for rank in ranks]


class _Task:
    """The parameters of difficulty in one data set."""

    def __init__(self, rng: random.Random) -> None:
        self._subjects = [rng.gauss(0.0, 1.0) for _ in range(_NUM_SUBJECTS)]
        self._asks = [rng.gauss(0.0, 0.6) for _ in range(_NUM_ASKS)]
        self._fits = [[rng.gauss(0.0, 0.35) for _ in range(_NUM_ASKS)] for _ in range(_NUM_FAMILIES)]
        self._story_weights = [1.0 / (rank + 2) for rank in range(_NUM_STORY_WORDS)]

    def draw(self, rng: random.Random) -> tuple[Sequence[int], float]:
        """Token ids of a prompt, and their shown difficulty."""
        subject, ask = rng.randrange(_NUM_SUBJECTS), rng.randrange(_NUM_ASKS)
        num_conditions = min(_MAX_CONDITIONS, int(rng.expovariate(0.6)))
        number = rng.randint(2, 99)
        difficulty = self._subjects[subject] + self._asks[ask] + self._fits[subject % _NUM_FAMILIES][ask]
        difficulty += 0.3 * num_conditions + 0.25 * math.log(number)
        task = [ask + 900, subject + _FIRST_TASK_ID, number + 2000]
        task += [rng.randrange(_NUM_CONDITIONS) + 3000 for _ in range(num_conditions)]
        story = rng.choices(range(_NUM_STORY_WORDS), weights=self._story_weights, k=rng.randint(5, 60))
        place = rng.randint(0, len(story))
        return [*story[:place], *task, *story[place:]], difficulty
