"""Settings of the reward `code`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config import StrictModel


def own_python() -> list[str]:
    """This Python without any installed packages."""
    return [os.path.realpath(sys.executable), "-I", "-S"]


class CodeConfig(StrictModel):
    """What candidates' programs are run by, and what they may use."""

    command: list[str] = Field(default_factory=own_python, min_length=1, max_length=32)
    """Runs a program whose path is appended: by default this Python without installed packages."""
    readable: list[Path] = Field(default_factory=list, max_length=64)
    """Further folders that programs may read, such as the installed packages of `command`."""
    cpu_s: float = Field(default=4.0, gt=0, le=600)
    """CPU seconds of each process of a program."""
    wall_s: float = Field(default=10.0, gt=0, le=600)
    """Seconds until a program is ended: for all calls of a function, or for one standard input."""
    memory_mb: int = Field(default=512, ge=16, le=65536)
    """Memory of all processes of a program."""
    max_processes: int = Field(default=8, ge=1, le=256)
    """Processes of a program at once."""
    output_kb: int = Field(default=256, ge=1, le=16384)
    """Most that a program may print or return for one test."""
    credit: Literal["all", "share"] = "all"
    """1 for a program that passes all tests, else 0; or the share of tests passed."""
    num_cells: int = Field(default=2, ge=1, le=256)
    """Programs run at once."""
    sandbox: Literal["auto", "sandlock", "bubblewrap", "container"] = "auto"
    """What confines programs; `auto` takes the first that works here, in this order."""
