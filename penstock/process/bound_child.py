"""Children that do not outlive their parent.

`python -m penstock.process.bound_child PARENT_PID SIGNAL COMMAND...` runs a command that ends with its parent, for
programs that are not ours: on Linux the kernel is asked to send the signal when the parent dies, which survives exec;
elsewhere the command just runs. `end_with_parent` does the same for a process of `multiprocessing` that another
library started, `end_group_with_parent` for a program of ours and all that it starts.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def bound(*command: str, ends_by: signal.Signals) -> tuple[str, ...]:
    """The command line of a child of this process that does not outlive it; `command` begins with a path."""
    return (sys.executable, "-P", "-m", "penstock.process.bound_child", str(os.getpid()), str(int(ends_by)), *command)


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, however it ended.

    Nothing happens in a process that `multiprocessing` did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def end_group_with_parent(parent_pid: int, *, grace_s: float) -> None:
    """Watch the parent of this process, the leader of a process group.

    Once the parent is gone this process gets SIGTERM, and after the grace its whole group SIGKILL.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_POLL_S)
        if grace_s > 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(grace_s)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(arguments: list[str]) -> None:
    """Become the command."""
    parent_pid, ends_by, command = int(arguments[0]), int(arguments[1]), arguments[2:]
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ends_by) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        # The parent may have died before the request was made.
        if os.getppid() != parent_pid:
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
