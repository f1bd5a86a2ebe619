"""Output that nobody reads on: `penstock run | head`."""

from __future__ import annotations

import os
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Let what is written to `stream` from now on go nowhere; the interpreter's last flush must not complain either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
