"""Draws rows of reasoning_gym from a child process, which is ended when it takes too long."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import ConfigError
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
        self._process: subprocess.Popen[bytes] | None = None
        self._ender: weakref.finalize[Any, Any] | None = None
        self._lock = threading.Lock()

    def draw(self, indices: Sequence[int]) -> list[DrawnRow]:
        """The rows at these indices. Raises ConfigError: there is no such task, or it makes no row in time."""
        with self._lock:
            return [self._draw_one(index) for index in indices]

    def close(self) -> None:
        """End the child."""
        self._process = None
        if self._ender is not None:
            self._ender()

    def _draw_one(self, index: int) -> DrawnRow:
        spec = self._source.spec(index, default_seed=self._default_seed)
        answer = self._ask({"row": spec})
        if "invalid" in answer:
            raise ConfigError(f"{self._field}: {answer['invalid']}")
        spec["version"] = answer["version"]
        return DrawnRow(answer["question"], answer["answer"], json.dumps({"reasoning_gym": spec}))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        timeout_s = ROW_TIMEOUT_S + (START_TIMEOUT_S if self._process is None else 0.0)
        if self._process is None:
            env = {**os.environ, "PYTHONHASHSEED": "0"}
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), *import_folders()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
            )
            # Also if `close` is never called.
            self._ender = weakref.finalize(self, _end, self._process)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self.close()
            raise ConfigError(f"{self._field}: {self._source} made no row {request['row']['index']} in {timeout_s:g} s")
        found: dict[str, Any] = json.loads(line)
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
