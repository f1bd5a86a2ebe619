"""Finds the environment behind `openenv:URL`, `nemo_gym:URL`, `textarena:GAME` and `mcp:COMMAND`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from penstock.environments.environment import Environment
from penstock.environments.imports.nemo_gym import NeMoGymSession, nemo_gym_options
from penstock.environments.imports.openenv_sessions import OpenEnvSession, openenv_options
from penstock.environments.imports.textarena_games import Games, TextArenaSession

MAX_OPTIONS = 32


class ImportNameError(ValueError):
    """A name does not lead to an environment; the message names the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Makes the environment of one session."""

    name: str
    make: Callable[[], Environment]
    version: str = ""
    opens: bool = True
    wants_token_ids: bool = False
    tools: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def __call__(self) -> Environment:
        """An environment of its own."""
        return self.make()


def imported(name: str) -> Imported | None:
    """The environment of that name; None if it is of none of these kinds. Raises ImportNameError."""
    kind, _, rest = name.partition(":")
    if kind not in _KINDS:
        return None
    what, _, query = rest.partition("?")
    if not what:
        raise ImportNameError(f"environment {name!r}: names nothing; write {_KINDS[kind][1]}")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=MAX_OPTIONS)
        return _KINDS[kind][0](what, {key: _value(value) for key, value in pairs})
    except (ValueError, OSError) as error:
        raise ImportNameError(f"environment {name!r}: {error}") from error


def _openenv(address: str, options: dict[str, Any]) -> Imported:
    found = openenv_options(address, options)
    return Imported(name=f"openenv {address}"[:64], make=lambda: OpenEnvSession(found))


def _nemo_gym(address: str, options: dict[str, Any]) -> Imported:
    found = nemo_gym_options(address, options)
    return Imported(name=f"nemo_gym {address}"[:64], make=lambda: NeMoGymSession(found), opens=False)


def _textarena(game: str, options: dict[str, Any]) -> Imported:
    games = Games(game, python=options.pop("python", None), options=options)
    return Imported(name=f"textarena {game}"[:64], make=lambda: TextArenaSession(games))


def _mcp(what: str, options: dict[str, Any]) -> Imported:
    try:
        from penstock.environments.imports.mcp_names import mcp_tools
        from penstock.environments.imports.mcp_tools import McpSession
    except ModuleNotFoundError as error:
        raise ValueError(f"needs the package {error.name}: pip install mcp==2.3.0") from error
    found = mcp_tools(what, options)
    name = f"mcp {found.server}"[:64]
    return Imported(name=name, make=lambda: McpSession(found), opens=False, tools=found.described)


def _value(text: str) -> Any:
    """A JSON value, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


_KINDS: Mapping[str, tuple[Callable[[str, dict[str, Any]], Imported], str]] = {
    "openenv": (_openenv, "openenv:http://HOST:PORT"),
    "nemo_gym": (_nemo_gym, "nemo_gym:http://HOST:PORT"),
    "mcp": (_mcp, "mcp:COMMAND or mcp:http://HOST:PORT/mcp"),
    "textarena": (_textarena, "textarena:GAME, for example textarena:GuessTheNumber-v0"),
}
