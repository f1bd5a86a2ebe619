"""CPU time of a process and of those it started: what other work on the machine changes least."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path


def cpu_s() -> float:
    """User and system time of this process and its live children (an engine's process), seconds."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        # utime and stime, fields 14 and 15 of proc(5).
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")
