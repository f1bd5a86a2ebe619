"""Compares a recording's new scores with its old ones, by who gave them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from console.recording.recorded_sample import Recorded
from penstock.v1 import types_pb2

SAME = 1e-9
"""Rewards that differ by less count as equal."""
MAX_PAIRS = 64
DETAILS_BEGIN = " ("


@dataclass(slots=True)
class GraderPair:
    """How the values of two graders differ on the same samples."""

    num_compared: int = 0
    num_same: int = 0
    change_sum: float = 0.0
    distance_sum: float = 0.0

    def add(self, previous: float, new: float) -> None:
        """Take in one sample."""
        self.num_compared += 1
        self.num_same += math.isclose(previous, new, rel_tol=SAME, abs_tol=SAME)
        self.change_sum += new - previous
        self.distance_sum += abs(new - previous)

    def as_document(self) -> dict[str, Any]:
        """As JSON."""
        count = self.num_compared
        return {
            "num_compared": count,
            "agreement": self.num_same / count,
            "mean_change": self.change_sum / count,
            "mean_distance": self.distance_sum / count,
        }

    def words(self) -> str:
        """As text."""
        found = self.as_document()
        return (
            f"{found['num_compared']} samples, {100 * found['agreement']:.1f} % agree, change "
            f"{found['mean_change']:+.4f}, {found['mean_distance']:.4f} apart"
        )


def grader_of(score: types_pb2.Score) -> str:
    """Who gave a score: the reward model, and of a judge the model that answered and the prompt it was given."""
    # Of a part of a sum the names begin with the part's.
    of_judges = (name for name in sorted(score.details) if name.rpartition("/")[2] in ("answered", "prompt"))
    details = [f"{name} {score.details[name]}" for name in of_judges]
    return f"{score.model}{DETAILS_BEGIN}{', '.join(details)})" if details else score.model


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Comparison of the new scores with the old ones."""

    is_decoded: bool = False
    """Whether texts were decoded from token ids; otherwise they are the recording's."""
    num_samples: int = 0
    """Samples scored."""
    by_status: Counter[str] = field(default_factory=Counter)
    """Samples by the new score's status."""
    num_compared: int = 0
    """Samples with a value in both."""
    num_same: int = 0
    """Samples whose values are equal."""
    previous_sum: float = 0.0
    """Sum of their old values."""
    new_sum: float = 0.0
    """Sum of their new values."""
    distance_sum: float = 0.0
    """Sum of how far the two are apart."""
    by_graders: dict[tuple[str, str], GraderPair] = field(default_factory=dict)
    """The same by who gave the old value and who the new one."""
    num_without_text: int = 0
    """Samples with tokens but without text, which most reward models cannot judge."""

    def add(self, sample: Recorded) -> None:
        """Take in a sample that was scored again."""
        new, previous = sample.trajectory.score, sample.previous_score
        self.num_samples += 1
        self.by_status[types_pb2.ScoreStatus.Name(new.status).removeprefix("SCORE_STATUS_").lower()] += 1
        has_text = self.is_decoded or bool(sample.trajectory.text) or not sample.trajectory.token_ids
        self.num_without_text += not has_text
        if previous is not None and previous.HasField("value") and new.HasField("value"):
            self.num_compared += 1
            self.num_same += math.isclose(previous.value, new.value, rel_tol=SAME, abs_tol=SAME)
            self.previous_sum += previous.value
            self.new_sum += new.value
            self.distance_sum += abs(new.value - previous.value)
            self._pair(grader_of(previous), grader_of(new)).add(previous.value, new.value)

    def _pair(self, before: str, now: str) -> GraderPair:
        """The counts of two graders; of more pairs than MAX_PAIRS the rest are counted together."""
        known = (before, now) in self.by_graders or len(self.by_graders) < MAX_PAIRS
        return self.by_graders.setdefault((before, now) if known else ("others", "others"), GraderPair())

    def as_document(self) -> dict[str, Any]:
        """The comparison as JSON; means are None if nothing could be compared."""

        def mean(total: float) -> float | None:
            return total / self.num_compared if self.num_compared else None

        return {
            "num_samples": self.num_samples,
            "by_status": dict(self.by_status),
            "num_compared": self.num_compared,
            "agreement": mean(self.num_same),
            "mean_previous": mean(self.previous_sum),
            "mean_new": mean(self.new_sum),
            "mean_change": mean(self.new_sum - self.previous_sum),
            "mean_distance": mean(self.distance_sum),
            "by_graders": [
                {"previous": before, "new": now, **pair.as_document()}
                for (before, now), pair in sorted(self.by_graders.items())
            ],
            "num_without_text": self.num_without_text,
        }

    def lines(self) -> Iterator[str]:
        """The comparison as readable text."""
        statuses = ", ".join(f"{name} {count}" for name, count in sorted(self.by_status.items()))
        yield f"{self.num_samples} samples scored: {statuses}"
        if self.num_compared:
            old, new = self.previous_sum / self.num_compared, self.new_sum / self.num_compared
            same = f"{100 * self.num_same / self.num_compared:.1f} % of {self.num_compared} agree"
            apart = self.distance_sum / self.num_compared
            yield f"{same}; mean {old:.4f} before, {new:.4f} now, change {new - old:+.4f}; {apart:.4f} apart on average"
        if len(self.by_graders) > 1 or any(DETAILS_BEGIN in before + now for before, now in self.by_graders):
            for (before, now), pair in sorted(self.by_graders.items()):
                yield f"  {before} -> {now}: {pair.words()}"
        if self.num_without_text:
            yield f"note: {self.num_without_text} samples have tokens but no text; only token ids could be judged"
