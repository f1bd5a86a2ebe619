"""Sessions of TextArena's games for one player (textarena 0.7), played in a child process.

The child may be another interpreter's (option `python`), since the package brings much that nothing else here needs. It
is ended where a game does not answer; sessions that were open in it are played again from their turns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.environments.environment import Environment
from penstock.environments.types import Action, Message, Opening, Outcome, ScoreStatus, Task, UnplayableError
from penstock.process.json_child import JsonChild, NoAnswerError

WORKER = Path(__file__).with_name("textarena_worker.py")
CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
MAX_SEED = 2**31
_session_numbers = itertools.count()


class GamesEndedError(Exception):
    """The child ended, or was ended, without an answer."""


class Games:
    """The child in which the sessions of one game are played.

    Raises ValueError: the package is missing, or an option is no value for a game.
    """

    def __init__(self, game: str, *, python: str | None, options: Mapping[str, Any]) -> None:
        if python is None and importlib.util.find_spec("textarena") is None:
            raise ValueError(
                "needs the package textarena: pip install textarena==0.7.4, or name the interpreter of an environment "
                "that has it: textarena:GAME?python=/PATH/bin/python"
            )
        if python is not None and not Path(python).is_file():
            raise ValueError(f"python: {python}: no such file")
        self.game = game
        self.options = dict(options)
        self._child = JsonChild(
            [python or sys.executable, str(WORKER)],
            answer_timeout_s=CALL_TIMEOUT_S,
            start_timeout_s=START_TIMEOUT_S,
            stderr=subprocess.DEVNULL,
        )
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The child's answer; one call at a time. Raises GamesEndedError."""
        with self._lock:
            try:
                return self._child.ask(request)
            except NoAnswerError as error:
                message = f"{self.game} did not answer within {error.timeout_s:g} s, or its process ended"
                raise GamesEndedError(message) from error


class TextArenaSession(Environment):
    """One session."""

    opens = True

    def __init__(self, games: Games) -> None:
        self._games = games
        self._name = f"{next(_session_numbers)}"
        self._reset: dict[str, Any] = {}
        self._turns: list[str] = []

    def reset(self, task: Task) -> Opening:
        """Begin the game, with the row's column `options` over those of the name."""
        columns = task.metadata.get("options", {})
        if not isinstance(columns, Mapping):
            raise UnplayableError(f"options: {type(columns).__name__}; must be an object of the game's options")
        options = {**self._games.options, **columns}
        self._reset = {"game": self._games.game, "seed": task.seed % MAX_SEED, "options": options}
        return Opening(messages=[Message(role="user", content=self._begin())])

    def step(self, action: Action) -> Outcome:
        """Move."""
        try:
            answer = self._moved(action.text)
        except GamesEndedError as error:
            return Outcome(status=ScoreStatus.FAILED, message=str(error))
        self._turns.append(action.text)
        if "failed" in answer:
            return Outcome(status=ScoreStatus.FAILED, message=answer["failed"])
        if answer["done"]:
            return Outcome(reward=answer["reward"], is_done=True, message=answer["reason"])
        return Outcome(messages=[Message(role="user", content=answer["text"] or "Go on.")])

    def close(self) -> None:
        """Forget the game."""
        with contextlib.suppress(GamesEndedError):
            self._games.ask({"session": self._name, "close": True})

    def _begin(self) -> str:
        answer = self._games.ask({"session": self._name, "reset": self._reset})
        if "invalid" in answer:
            raise UnplayableError(f"textarena:{answer['invalid']}")
        return str(answer["text"])

    def _moved(self, text: str) -> dict[str, Any]:
        # Another session may have been what the process ended by.
        with contextlib.suppress(GamesEndedError):
            answer = self._games.ask({"session": self._name, "step": text})
            if "unknown" not in answer:
                return answer
        self._begin()
        for turn in self._turns:
            self._games.ask({"session": self._name, "step": turn})
        return self._games.ask({"session": self._name, "step": text})
