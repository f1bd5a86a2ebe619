"""Builds the reward model that a configured name stands for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from penstock.rewards import BatchReward, RewardLoadError, RewardModel, load_reward
from penstock.rewards.local import LocalModel
from penstock.rewards.wire import THIRD_PARTY
from penstock.security import NO_SECURITY, Security
from services.reward.models.exact_match import exact_match
from services.reward.models.inline import InlineReward
from services.reward.models.math_reward import MathReward
from services.reward.models.numeric import numeric
from services.reward.models.remote import RemoteModel

BUILT_IN: dict[str, Callable[[], BatchReward]] = {
    "exact_match": lambda: InlineReward(exact_match, name="exact_match"),
    "numeric": lambda: InlineReward(numeric, name="numeric"),
    "math": MathReward,
}
"""The built-in rules by name; a new one is a file beside this one and a line here."""
_ADDRESS = re.compile(r"grpc://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(\d{1,5})")


def build_model(name: str, *, judges: Security = NO_SECURITY) -> RewardModel:
    """The model behind a built-in name, `module:function` or grpc://host:port, which is shown `judges`.

    Raises RewardLoadError.
    """
    check_name(name)
    if name.startswith(THIRD_PARTY):
        return RemoteModel(name, security=judges)
    return LocalModel(load_reward(name) if ":" in name else BUILT_IN[name]())


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
