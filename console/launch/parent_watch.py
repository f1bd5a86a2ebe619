"""Prevents orphans: a service started by the launcher ends when the launcher is gone, even if it was killed.

Redis, which is not a Python program, is ended by the kernel: see `penstock.process.bound_child`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from console.launch.supervisor import LAUNCHER_VARIABLE
from penstock.process.bound_child import end_group_with_parent

_GRACE_S = 15.0


def watch_launcher(environ: Mapping[str, str]) -> bool:
    """Start watching the launcher named in the environment; returns whether this process has one.

    Only the process that the launcher started watches: children of a service inherit the environment but have another
    parent.
    """
    launcher = environ.get(LAUNCHER_VARIABLE, "")
    if not launcher.isdecimal() or os.getppid() != int(launcher) or os.getpgrp() != os.getpid():
        return False
    end_group_with_parent(int(launcher), grace_s=_GRACE_S)
    return True
