"""Asks a child process questions, a line of JSON each, and ends it when an answer takes too long."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any


class NoAnswerError(Exception):
    """The child ended, or was ended, without an answer."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no answer within {timeout_s:g} s, or the process ended")
        self.timeout_s = timeout_s


class JsonChild:
    """Started by the first question, and by the first after it ended; one question at a time.

    It ends with this object at the latest, also if `close` is never called.

    Args:
        command: The program and its arguments.
        answer_timeout_s: For an answer.
        start_timeout_s: For the first answer as well.
        env: Its environment; None: this process'.
        stderr: As for `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        answer_timeout_s: float,
        start_timeout_s: float,
        env: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        self._command, self._env, self._stderr = command, env, stderr
        self._answer_timeout_s, self._start_timeout_s = answer_timeout_s, start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._ender: weakref.finalize[Any, Any] | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer. Raises NoAnswerError; the child is then ended."""
        timeout_s = self._answer_timeout_s + (self._start_timeout_s if self._process is None else 0.0)
        process = self._process or self._start()
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
            raise NoAnswerError(timeout_s)
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the child."""
        self._process = None
        if self._ender is not None:
            self._ender()

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=self._env
        )
        self._ender = weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
