"""Processes of a benchmark that start others of their own, which the kernel would not end with it."""

from __future__ import annotations

import os
import signal
import threading
import time

_WATCH_POLL_S = 0.2


def end_group_with_parent() -> None:
    """Watch this process's parent, and kill this process's whole group when it is gone.

    To be called by the leader of a group of its own.
    """
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_WATCH_POLL_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
