"""Reads a judge's answer: exactly the schema, or an error. Nothing is guessed, searched for or repaired."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from services.reward.judge.config import JudgeConfig

_MAX_SHOWN_CHARACTERS = 120


class UnusableAnswerError(Exception):
    """An answer that is no vote; the message says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One vote."""

    scores: dict[str, float]
    """By criterion, as a share of the scale; a comparison has the one criterion `same`, 1 or 0."""

    @property
    def value(self) -> float:
        """The vote as a number: the mean over criteria, from 0 to 1."""
        return sum(self.scores.values()) / len(self.scores)


SAME = "same"
"""The one criterion of a comparison."""


def read_verdict(content: str, config: JudgeConfig) -> Verdict:
    """The vote that `content` is. Raises UnusableAnswerError."""
    found = _read_json(content)
    if not config.rubric:
        _check_keys(found, {"reason", "verdict"})
        if found["verdict"] not in ("same", "different"):
            raise UnusableAnswerError(f"verdict is {_shown(found['verdict'])}, not same or different")
        return Verdict({SAME: float(found["verdict"] == "same")})
    _check_keys(found, {"reason", "scores"})
    scores = found["scores"]
    if not isinstance(scores, dict):
        raise UnusableAnswerError(f"scores is {_shown(scores)}, not an object")
    _check_keys(scores, set(config.rubric), where="scores")
    least, most = config.scale
    return Verdict({name: (_whole(scores[name], name, config) - least) / (most - least) for name in config.rubric})


def _read_json(content: str) -> dict[str, Any]:
    try:
        found = json.loads(content, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UnusableAnswerError(f"the answer is not JSON ({error}): {_shown(content)}") from error
    if not isinstance(found, dict):
        raise UnusableAnswerError(f"the answer is not a JSON object: {_shown(content)}")
    if not isinstance(found.get("reason"), str):
        raise UnusableAnswerError(f"reason is {_shown(found.get('reason'))}, not text")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check_keys(found: dict[str, Any], expected: set[str], *, where: str = "the answer") -> None:
    if found.keys() != expected:
        odd = ", ".join(sorted(found.keys() ^ expected))
        raise UnusableAnswerError(f"{where} must have exactly the keys {', '.join(sorted(expected))}; odd: {odd:.100}")


def _whole(value: Any, name: str, config: JudgeConfig) -> int:
    least, most = config.scale
    if type(value) is not int or not least <= value <= most:
        raise UnusableAnswerError(f"scores.{name} is {_shown(value)}, not a whole number from {least} to {most}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN_CHARACTERS]
