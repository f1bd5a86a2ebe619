"""Handles output whose reader has gone, as in `penstock run | head`."""

from __future__ import annotations

import os
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Discard everything written to `stream` from now on, so that the interpreter's last flush does not fail either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
