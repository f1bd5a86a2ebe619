"""Talks with running programs through pipes: bounded in bytes and time, whatever they do."""

from __future__ import annotations

import contextlib
import os
import selectors
import time

_PIECE_BYTES = 65536


class LimitError(Exception):
    """A program exceeded a limit; the text says which."""


def converse(stdin: int, stdout: int, sent: bytes, *, deadline_s: float, max_bytes: int) -> bytes:
    """Send everything, then the end, and read until the program closes its output.

    Args:
        stdin: Descriptor of the program's standard input; stays open, so close it by `Running.end`.
        stdout: Of its output.
        sent: Its whole input; what it does not read is dropped.
        deadline_s: By the monotonic clock.
        max_bytes: Most that it may print.

    Raises:
        LimitError: It printed more, or was not done by then.
    """
    os.set_blocking(stdin, False)
    rest, printed = memoryview(sent), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        if rest:
            selector.register(stdin, selectors.EVENT_WRITE)
        else:
            _end_input(stdin)
        while True:
            for key, _ in _ready(selector, deadline_s):
                if key.fd == stdout:
                    if not (piece := os.read(stdout, _PIECE_BYTES)):
                        return bytes(printed)
                    printed += piece
                    if len(printed) > max_bytes:
                        raise LimitError("its output")
                    continue
                try:
                    rest = rest[os.write(stdin, rest) :]
                except BlockingIOError:
                    continue
                except OSError:
                    rest = rest[:0]
                if not rest:
                    selector.unregister(stdin)
                    _end_input(stdin)


class Lines:
    """Reads lines of a program, one at a time."""

    def __init__(self, stdout: int, *, deadline_s: float, max_bytes: int) -> None:
        """`max_bytes` of a line."""
        self._stdout, self._deadline_s, self._max_bytes = stdout, deadline_s, max_bytes
        self._read = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(stdout, selectors.EVENT_READ)

    def next(self) -> bytes | None:
        """The next line without its end; None once there is none any more. Raises LimitError."""
        while (end := self._read.find(b"\n")) < 0:
            if len(self._read) > self._max_bytes:
                raise LimitError("its output")
            _ready(self._selector, self._deadline_s)
            if not (piece := os.read(self._stdout, _PIECE_BYTES)):
                return None
            self._read += piece
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line

    def close(self) -> None:
        """Release the selector; the descriptor stays open."""
        self._selector.close()


def send(stdin: int, data: bytes, *, deadline_s: float) -> bool:
    """Write everything; whether the program was there to take it. Raises LimitError: it does not read."""
    os.set_blocking(stdin, False)
    rest = memoryview(data)
    with selectors.DefaultSelector() as selector:
        selector.register(stdin, selectors.EVENT_WRITE)
        while rest:
            _ready(selector, deadline_s)
            try:
                rest = rest[os.write(stdin, rest) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
    return True


def _ready(selector: selectors.BaseSelector, deadline_s: float) -> list[tuple[selectors.SelectorKey, int]]:
    found = selector.select(max(0.0, deadline_s - time.monotonic()))
    if not found:
        raise LimitError("its time")
    return found


def _end_input(stdin: int) -> None:
    """The program reads its end; the descriptor's number stays taken until it is closed by its owner."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        os.dup2(null, stdin)
    os.close(null)
