"""Finds the reward model behind a `module:function` name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys

from penstock.rewards.function import FunctionReward
from penstock.rewards.model import BatchReward


class RewardLoadError(Exception):
    """A name does not resolve to a reward; the message is one line that names the fix."""


def load_reward(name: str) -> BatchReward:
    """The reward behind `module:function`, looked up in the current directory too.

    The name may lead to a function, to something decorated with `reward`, to a BatchReward, or to a subclass of it that
    is made without arguments. Raises RewardLoadError.
    """
    return as_reward(find_object(name, kind="reward", example="my_rewards:exact"), name=name)


def find_object(name: str, *, kind: str, example: str) -> object:
    """What `module:attribute` names; errors call it a `kind`, and show `example`. Raises RewardLoadError."""
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute.isidentifier():
        shape = "module:Class" if kind == "environment" else "module:function"
        raise RewardLoadError(f"{kind} {name!r}: write it as {shape}, for example {example}")
    _add_current_directory()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise RewardLoadError(f"{kind} {name!r}: {_describe_missing(module_name, error)}") from error
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise RewardLoadError(
            f"{kind} {name!r}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RewardLoadError(f"{kind} {name!r}: module {module_name} has no {attribute!r}{hint}")
    return found


def as_reward(found: object, *, name: str = "") -> BatchReward:
    """`found` as a BatchReward: a function (decorated or not), a BatchReward, or a subclass. Raises RewardLoadError."""
    try:
        if isinstance(found, BatchReward):
            return found
        if isinstance(found, type) and issubclass(found, BatchReward):
            return found()
        if callable(found) and not isinstance(found, type):
            return FunctionReward(found)
    except (TypeError, ValueError) as error:
        raise RewardLoadError(f"reward {name!r}: {error}" if name else str(error)) from error
    raise RewardLoadError(f"reward {name!r}: expected a function or a BatchReward, found {type(found).__name__}")


def _describe_missing(module_name: str, error: ModuleNotFoundError) -> str:
    if error.name is not None and module_name.split(".")[0] != error.name.split(".")[0]:
        return f"{module_name} imports {error.name!r}, which is not installed"
    return (
        f"no module {module_name!r} is installed or in {os.getcwd()}; "
        "run from the folder that holds it, or add that folder to PYTHONPATH"
    )


def _add_current_directory() -> None:
    # An installed command does not search the folder it is started in, where a user's own module usually lies.
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        sys.path.insert(0, directory)
