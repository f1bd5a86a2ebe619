"""Builds the reward model that a configured name stands for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

from penstock.rewards import BatchReward, RewardItem, RewardLoadError, RewardModel, RewardResult, load_reward
from penstock.rewards.local import LocalModel
from penstock.rewards.outcomes import read_error
from penstock.rewards.wire import THIRD_PARTY
from penstock.security import NO_SECURITY, Security
from services.reward.code.code_reward import CodeReward
from services.reward.code.config import CodeConfig
from services.reward.models.exact_match import exact_match
from services.reward.models.math_reward import MathReward
from services.reward.models.numeric import numeric
from services.reward.models.remote import RemoteModel


class InlineReward(BatchReward):
    """Calls `function(item)` in the event loop, once a sample: a thread would cost more than a built-in rule."""

    max_batch_size = 1024

    def __init__(self, function: Callable[[RewardItem], float], *, name: str) -> None:
        self.name = name
        self._function = function

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order."""
        return [self._score_one(item) for item in items]

    def _score_one(self, item: RewardItem) -> RewardResult:
        try:
            return RewardResult(self._function(item))
        except Exception as error:  # of this sample only: its neighbours keep their scores
            return read_error(error, name=self.name)


BUILT_IN: dict[str, Callable[[CodeConfig], BatchReward]] = {
    "exact_match": lambda _: InlineReward(exact_match, name="exact_match"),
    "numeric": lambda _: InlineReward(numeric, name="numeric"),
    "math": lambda _: MathReward(),
    "code": CodeReward,
}
"""The built-in rules by name; a new one is a file beside this one and a line here."""
_ADDRESS = re.compile(r"grpc://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(\d{1,5})")


def build_model(name: str, *, judges: Security = NO_SECURITY, code: CodeConfig | None = None) -> RewardModel:
    """The model behind a built-in name, `module:function` or grpc://host:port, which is shown `judges`.

    `code` are the settings of the reward of that name.

    Raises RewardLoadError.
    """
    check_name(name)
    if name.startswith(THIRD_PARTY):
        return RemoteModel(name, security=judges)
    return LocalModel(load_reward(name) if ":" in name else BUILT_IN[name](code or CodeConfig()))


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
