"""Finds the environment behind a `module:Class` name."""

from __future__ import annotations

from typing import Any

from penstock.environments.environment import Environment, EnvironmentFactory
from penstock.environments.imports.names import ImportNameError, imported
from penstock.rewards.loading import RewardLoadError, find_object


class EnvironmentLoadError(Exception):
    """A name does not resolve to an environment; the message is one line that names the fix."""


def load_environment(name: str) -> EnvironmentFactory:
    """The class or factory of that name, looked up in the current directory too, or of another package.

    Those are named `openenv:URL`, `nemo_gym:URL`, `textarena:GAME` and `mcp:COMMAND` (docs/imports.md).

    Raises EnvironmentLoadError.
    """
    try:
        if (found_elsewhere := imported(name)) is not None:
            return found_elsewhere
    except ImportNameError as error:
        raise EnvironmentLoadError(str(error)) from error
    try:
        found: Any = find_object(name, kind="environment", example="my_environments:Countdown")
    except RewardLoadError as error:
        raise EnvironmentLoadError(str(error)) from error
    is_class = isinstance(found, type)
    if (is_class and not issubclass(found, Environment)) or not callable(found):
        what = "a class" if is_class else type(found).__name__
        raise EnvironmentLoadError(
            f"environment {name!r}: expected a subclass of penstock.environments.Environment, or a function that makes "
            f"one, found {what}"
        )
    return found  # type: ignore[no-any-return]
