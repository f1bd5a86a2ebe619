"""Builds the reward model that a configuration stands for."""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.rewards import BatchReward, RewardItem, RewardLoadError, RewardModel, RewardResult, load_reward
from penstock.rewards.local import LocalModel
from penstock.rewards.outcomes import read_error
from penstock.rewards.score_messages import THIRD_PARTY
from penstock.security import NO_SECURITY, Security
from services.reward.code.code_reward import CodeReward
from services.reward.config import ModelConfig, RewardModelConfig
from services.reward.models.composite import CompositeModel, Part
from services.reward.models.exact_match import exact_match
from services.reward.models.format import has_format
from services.reward.models.length import length_value, num_completion_tokens
from services.reward.models.limits import WrongAtLimit
from services.reward.models.math_reward import MathReward
from services.reward.models.ngram_repetition import ngram_repetition
from services.reward.models.numeric import numeric
from services.reward.models.remote import RemoteModel
from services.reward.reasoning_gym.reward import ReasoningGymReward


class InlineReward(BatchReward):
    """Calls `function(item)` in the event loop, once a sample: a thread would cost more than a built-in rule."""

    max_batch_size = 1024

    def __init__(
        self, function: Callable[[RewardItem], float], *, name: str, version: str = "", wants_token_ids: bool = False
    ) -> None:
        self.name = name
        self.version = version
        self.wants_token_ids = wants_token_ids
        self._function = function

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order."""
        results = []
        begun_s = time.monotonic()
        for item in items:
            results.append(self._score_one(item))
            if time.monotonic() - begun_s > _MOST_AT_ONCE_S:
                # Long texts take their time, and leases are renewed meanwhile.
                await asyncio.sleep(0)
                begun_s = time.monotonic()
        return results

    def _score_one(self, item: RewardItem) -> RewardResult:
        try:
            return RewardResult(self._function(item))
        except Exception as error:  # of this sample only: its neighbours keep their scores
            return read_error(error, name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInSettings:
    """What a reward model is built from."""

    config: ModelConfig
    judges: Security = NO_SECURITY
    """What third parties' reward models are shown."""
    security: Security = NO_SECURITY
    """What the run's own services are shown."""


def _format(settings: BuiltInSettings) -> BatchReward:
    config = settings.config.format
    return InlineReward(lambda item: float(has_format(item.completion, config)), name="format")


def _length(settings: BuiltInSettings) -> BatchReward:
    config = settings.config.length
    assert config is not None, "the configuration has been checked"

    def value(item: RewardItem) -> float:
        return length_value(num_completion_tokens(item), config)

    return InlineReward(value, name="length", wants_token_ids=True)


def _ngram_repetition(settings: BuiltInSettings) -> BatchReward:
    config = settings.config.ngram_repetition
    value = partial(ngram_repetition, config=config)
    return InlineReward(value, name="ngram_repetition", wants_token_ids=config.unit == "tokens")


def _code(settings: BuiltInSettings) -> BatchReward:
    drops = settings.config.candidate_limit == "drop"
    return CodeReward(settings.config.code, drops_at_limit=drops, security=settings.security)


def _judge(settings: BuiltInSettings) -> BatchReward:
    if importlib.util.find_spec("httpx2") is None:
        raise RewardLoadError("reward 'judge' needs the package httpx2: pip install httpx2")
    from services.reward.judge.judge_reward import JudgeReward

    if settings.config.judge is None:
        raise RewardLoadError("reward 'judge' needs reward.judge.url and reward.judge.model: which endpoint judges")
    return JudgeReward(settings.config.judge, security=settings.judges)


BUILT_IN: dict[str, Callable[[BuiltInSettings], BatchReward]] = {
    "exact_match": lambda _: InlineReward(exact_match, name="exact_match"),
    "numeric": lambda _: InlineReward(numeric, name="numeric"),
    "math": lambda _: MathReward(),
    "code": _code,
    "format": _format,
    "length": _length,
    "ngram_repetition": _ngram_repetition,
    "judge": _judge,
    "reasoning_gym": lambda settings: ReasoningGymReward(settings.config.code, security=settings.security),
}
"""The built-in rules by name; a new one is a file beside this one and a line here."""
_ADDRESS = re.compile(r"grpc://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(\d{1,5})")
_MOST_AT_ONCE_S = 0.01


def build_model(
    config: RewardModelConfig | str, *, judges: Security = NO_SECURITY, security: Security = NO_SECURITY
) -> RewardModel:
    """The reward model of a configuration, or of a name alone.

    Servers at grpc://host:port are shown `judges`, the run's own services `security`. Raises RewardLoadError.
    """
    if isinstance(config, str):
        config = RewardModelConfig(model=config)
    for each in config.models:
        check_name(each.model)

    def build(own: ModelConfig) -> RewardModel:
        return _build(BuiltInSettings(config=own, judges=judges, security=security))

    if not config.parts:
        return build(config)
    return CompositeModel([Part(name=each.component, weight=each.weight, model=build(each)) for each in config.parts])


def _build(settings: BuiltInSettings) -> RewardModel:
    name = settings.config.model
    model: RewardModel
    if name.startswith(THIRD_PARTY):
        model = RemoteModel(name, security=settings.judges)
    else:
        model = LocalModel(load_reward(name) if ":" in name else BUILT_IN[name](settings))
    return model if settings.config.candidate_limit == "drop" else WrongAtLimit(model)


def check_name(name: str) -> None:
    """Raises RewardLoadError when `name` is of none of the three kinds. Does not import the user's module."""
    if "://" in name:
        found = _ADDRESS.fullmatch(name)
        if found is None or not 1 <= int(found[1]) <= 65535:
            raise RewardLoadError(f"reward {name!r}: write it as grpc://host:port, for example grpc://127.0.0.1:7310")
    elif ":" not in name and name not in BUILT_IN:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built in are {', '.join(BUILT_IN)};"
        raise RewardLoadError(f"reward {name!r}: {hint} a function of yours is written module:function")
