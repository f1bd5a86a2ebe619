"""Questions to a running program and its answers, a line each: Python literals."""

from __future__ import annotations

import ast
import time
from typing import Any

from services.reward.code.exchange import LimitError, Lines, send
from services.reward.code.sandboxes.sandbox import Limits, Running

UNREADABLE = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
"""What `literal_eval` raises for what is no literal."""


class Talk:
    """Bounded by what a program may take, from now on."""

    def __init__(self, running: Running, limits: Limits) -> None:
        self._running = running
        self._deadline_s = time.monotonic() + limits.wall_s
        self._lines = Lines(running.stdout, deadline_s=self._deadline_s, max_bytes=limits.output_bytes)
        self.limit = ""
        """Which limit the program exceeded; empty if none."""
        self.last: dict[str, Any] = {}
        """Its last answer."""

    def ask(self, message: Any) -> dict[str, Any]:
        """Its answer, whatever it is; empty if there is none, which it is from then on. None only awaits the next."""
        self.last = self._answer(message)
        return self.last

    def _answer(self, message: Any) -> dict[str, Any]:
        if self.limit:
            return {}
        try:
            if message is not None:
                send(self._running.stdin, ascii(message).encode() + b"\n", deadline_s=self._deadline_s)
            line = self._lines.next()
            if line is None:
                self.limit = self._running.wait(self._deadline_s - time.monotonic()).limit
                return {}
            found = ast.literal_eval(line.decode("ascii"))
        except LimitError as error:
            self.limit = str(error)
            return {}
        except UNREADABLE:
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Stop listening."""
        self._lines.close()


def literal(text: object) -> str | None:
    """The literal that a text is, written anew; None if it is none."""
    try:
        return repr(ast.literal_eval(text)) if isinstance(text, str) else None
    except UNREADABLE:
        return None
