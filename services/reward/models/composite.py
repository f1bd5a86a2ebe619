"""Adds up several reward models.

Invariants:
- A sample gets the weighted sum of all its parts, or the status of one that could not judge it: never a partial sum.
- Which status that is depends on the parts' statuses alone, not on which of them answered first.
- A part that has judged a sample is not asked again while another one's failure is retried.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.errors import PenstockError, ServiceUnavailableError
from penstock.rewards import RewardModel
from penstock.rewards.grader_errors import is_grader_error
from penstock.rewards.model import DEFAULT_MAX_BATCH_SIZE
from penstock.rewards.outcomes import MAX_COMPONENTS, MAX_NAME_CHARACTERS, clean_text
from penstock.rewards.score_messages import failed_score
from penstock.v1 import reward_pb2, types_pb2
from penstock.wire.score_rules import MAX_DETAILS, MAX_REWARD, is_reward
from services.reward.metrics import PART_SCORES

MAX_REMEMBERED = 8192
"""Samples whose parts are kept for another try; the pool holds far fewer. The oldest are forgotten first."""
RANKED_STATUSES = (
    types_pb2.SCORE_STATUS_INVALID,
    types_pb2.SCORE_STATUS_ABSTAINED,
    types_pb2.SCORE_STATUS_CANDIDATE_LIMIT,
    types_pb2.SCORE_STATUS_TIMEOUT,
    types_pb2.SCORE_STATUS_FAILED,
    types_pb2.SCORE_STATUS_SANDBOX_ERROR,
    types_pb2.SCORE_STATUS_JUDGE_ERROR,
)
"""The first that a part has is the whole's: those first that no further try would change."""

_Scores = dict[str, types_pb2.Score]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A reward model as a part."""

    name: str
    """Its component's name."""
    weight: float
    model: RewardModel


class CompositeModel:
    """A reward model that is the weighted sum of others."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._remembered: OrderedDict[bytes, _Scores] = OrderedDict()
        self.name = clean_text("+".join(part.name for part in parts), MAX_NAME_CHARACTERS)

    async def check(self) -> str:
        """What the parts' own checks say. Raises RewardLoadError and ModelAwayError."""
        said = await asyncio.gather(*(part.model.check() for part in self._parts))
        return "; ".join(f"{part.name}: {text}" for part, text in zip(self._parts, said, strict=True) if text)

    async def probe(self) -> None:
        """Return when every part answers. Raises ModelAwayError."""
        await asyncio.gather(*(part.model.probe() for part in self._parts))

    async def describe(self) -> reward_pb2.GetRewardModelResponse:
        """Its parts, and what all of them can do."""
        found = await asyncio.gather(*(part.model.describe() for part in self._parts))
        return reward_pb2.GetRewardModelResponse(
            name=self.name,
            max_batch_size=min(each.max_batch_size or DEFAULT_MAX_BATCH_SIZE for each in found),
            wants_token_ids=any(each.wants_token_ids for each in found),
            parts=[
                reward_pb2.RewardPart(
                    name=part.name, weight=part.weight, model=each.name or part.model.name, version=each.version
                )
                for part, each in zip(self._parts, found, strict=True)
            ],
        )

    async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[types_pb2.Score]:
        """One score per item, in order. Raises PenstockError if a part did not answer; what the others said is kept."""
        found = self._recalled(items)
        answers = await asyncio.gather(*(self._ask(part, items, found, timeout_s) for part in self._parts))
        errors = [error for error in answers if error is not None]
        if errors:
            self._remember(zip(items, found, strict=True))
            raise min(errors, key=_rank)
        scores = [self._sum(each) for each in found]
        judged = zip(items, found, scores, strict=True)
        self._remember((item, each) for item, each, score in judged if is_grader_error(score))
        return scores

    async def close(self) -> None:
        """Close all parts."""
        await asyncio.gather(*(part.model.close() for part in self._parts))

    async def _ask(
        self, part: Part, items: Sequence[reward_pb2.ScoreItem], found: Sequence[_Scores], timeout_s: float
    ) -> PenstockError | None:
        """Add the part's scores to `found` where they are missing; returns why that failed, or None."""
        missing = [(item, each) for item, each in zip(items, found, strict=True) if part.name not in each]
        if not missing:
            return None
        try:
            scores = await part.model.score([item for item, _ in missing], timeout_s=timeout_s)
        except PenstockError as error:
            PART_SCORES.labels(part.name, "unanswered").inc(len(missing))
            return error
        for (_, each), score in zip(missing, scores, strict=True):
            each[part.name] = score
            PART_SCORES.labels(part.name, _word(score)).inc()
        return None

    def _sum(self, scores: _Scores) -> types_pb2.Score:
        unjudged = [part for part in self._parts if scores[part.name].status != types_pb2.SCORE_STATUS_OK]
        if unjudged:
            part = min(unjudged, key=lambda part: RANKED_STATUSES.index(scores[part.name].status))
            score = scores[part.name]
            message = clean_text(f"{part.name}: {score.message}")
            return types_pb2.Score(status=score.status, message=message, model=self.name)
        value = sum(part.weight * scores[part.name].value for part in self._parts)
        if not is_reward(value):
            return failed_score(f"the sum of the parts is {value:g}, beyond {MAX_REWARD:g}", model=self.name)
        components = {part.name: scores[part.name].value for part in self._parts}
        for part in self._parts:
            for name, number in sorted(scores[part.name].components.items()):
                if len(components) < MAX_COMPONENTS:
                    components[clean_text(f"{part.name}/{name}", MAX_NAME_CHARACTERS)] = number
        return types_pb2.Score(
            status=types_pb2.SCORE_STATUS_OK,
            value=value,
            components=components,
            details=self._details(scores),
            model=self.name,
        )

    def _details(self, scores: _Scores) -> dict[str, str]:
        """The parts' details, by part and name; those of the first parts of too many."""
        named = (
            (clean_text(f"{part.name}/{name}", MAX_NAME_CHARACTERS), text)
            for part in self._parts
            for name, text in sorted(scores[part.name].details.items())
        )
        return dict(islice(named, MAX_DETAILS))

    def _recalled(self, items: Sequence[reward_pb2.ScoreItem]) -> list[_Scores]:
        """What parts said of each item, and forgets it; empty for an item that is new."""
        if not self._remembered:
            return [{} for _ in items]
        return [self._remembered.pop(_digest(item), {}) for item in items]

    def _remember(self, found: Iterable[tuple[reward_pb2.ScoreItem, _Scores]]) -> None:
        for item, scores in found:
            if item.must_be_fresh:
                continue
            kept = {name: score for name, score in scores.items() if not is_grader_error(score)}
            if kept:
                self._remembered[_digest(item)] = kept
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def _rank(error: PenstockError) -> tuple[bool, bool]:
    # A part that is away costs no sample its attempts, so that it is named first.
    return not isinstance(error, ServiceUnavailableError), not error.is_retryable


def _digest(item: reward_pb2.ScoreItem) -> bytes:
    # By content: callers other than the pool need not name their samples.
    return hashlib.blake2b(item.SerializeToString(deterministic=True), digest_size=16).digest()


def _word(score: types_pb2.Score) -> str:
    return types_pb2.ScoreStatus.Name(score.status).removeprefix("SCORE_STATUS_").lower()
