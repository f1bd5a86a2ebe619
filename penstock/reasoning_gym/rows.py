"""Draws rows of reasoning_gym from a child process, which is ended when it takes too long."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import ConfigError
from penstock.process.json_child import JsonChild, NoAnswerError
from penstock.reasoning_gym.source import PACKAGE, ReasoningGymSource, require_package

ROW_TIMEOUT_S = 60.0
"""For one row; tasks with a table of words or programs take seconds for their first."""
START_TIMEOUT_S = 120.0
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """One row."""

    question: str
    answer: str
    """Empty if many answers are right."""
    spec_json: str
    """The row's metadata: by it the reward makes the row again."""


def import_folders() -> list[str]:
    """What the worker imports from: the standard library, installed packages, and where reasoning_gym is.

    Raises ConfigError: it is missing.
    """
    require_package("this")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    own = str(Path(spec.origin).parents[1])
    base = os.path.realpath(sys.base_prefix)
    installed = [
        each for each in sys.path if each.startswith(base) or each.endswith(("site-packages", "dist-packages"))
    ]
    return [each for each in dict.fromkeys([*installed, own]) if os.path.isdir(each)]


class RowDrawer:
    """Draws rows of one source; blocks meanwhile. `close` it."""

    def __init__(self, field: str, source: ReasoningGymSource, *, default_seed: int = 0) -> None:
        """`field` of the configuration is named in errors. Raises ConfigError: the package is missing."""
        require_package(f"{field}: {source}")
        self._field, self._source, self._default_seed = field, source, default_seed
        self._child = JsonChild(
            [sys.executable, str(WORKER), *import_folders()],
            answer_timeout_s=ROW_TIMEOUT_S,
            start_timeout_s=START_TIMEOUT_S,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self._lock = threading.Lock()

    def draw(self, indices: Sequence[int]) -> list[DrawnRow]:
        """The rows at these indices. Raises ConfigError: there is no such task, or it makes no row in time."""
        with self._lock:
            return [self._draw_one(index) for index in indices]

    def close(self) -> None:
        """End the child."""
        self._child.close()

    def _draw_one(self, index: int) -> DrawnRow:
        spec = self._source.spec(index, default_seed=self._default_seed)
        try:
            answer = self._child.ask({"row": spec})
        except NoAnswerError as error:
            raise ConfigError(f"{self._field}: {self._source} made no row {index} in {error.timeout_s:g} s") from error
        if "invalid" in answer:
            raise ConfigError(f"{self._field}: {answer['invalid']}")
        spec["version"] = answer["version"]
        return DrawnRow(answer["question"], answer["answer"], json.dumps({"reasoning_gym": spec}))
