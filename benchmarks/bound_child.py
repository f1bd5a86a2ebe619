"""Runs a command that ends with its parent: `python -m benchmarks.bound_child PARENT_PID COMMAND...`.

On Linux the kernel is asked to send SIGKILL when the parent dies, which survives exec; elsewhere the command just runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_WATCH_POLL_S = 0.2


def bound(*command: str) -> tuple[str, ...]:
    """The command line of a child of this process that does not outlive it; `command` begins with a path."""
    return (sys.executable, "-m", "benchmarks.bound_child", str(os.getpid()), *command)


def end_group_with_parent() -> None:
    """Watch this process's parent, and kill this process's whole group when it is gone.

    For processes that start others, which the kernel would not end; to be called by the leader of a group of its own.
    """
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_WATCH_POLL_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(arguments: list[str]) -> None:
    """Become the command."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        # The parent may have died before the request was made.
        if os.getppid() != parent_pid:
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
