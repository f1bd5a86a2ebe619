"""No orphans: a service started by the launcher ends when the launcher is gone, even when that was killed.

Redis, which is no Python program, gets the same from the kernel: see `penstock.process.bound_child`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping

from console.launch.supervisor import LAUNCHER_VARIABLE

_POLL_S = 0.5
_GRACE_S = 15.0


def watch_launcher(environ: Mapping[str, str]) -> bool:
    """Begin to watch the launcher named in the environment; whether this process has one.

    When it is gone this process gets SIGTERM, and after a grace its whole group SIGKILL. Only the process that the
    launcher started itself watches: what a service starts inherits the environment but has another parent.
    """
    launcher = environ.get(LAUNCHER_VARIABLE, "")
    if not launcher.isdecimal() or os.getppid() != int(launcher) or os.getpgrp() != os.getpid():
        return False
    threading.Thread(target=_watch, args=(int(launcher),), name="launcher-watch", daemon=True).start()
    return True


def _watch(launcher_pid: int) -> None:
    while os.getppid() == launcher_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)
