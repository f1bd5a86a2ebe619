"""A broker in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

from penstock.network import rpc
from tests.helpers.ports import free_address

START_TIMEOUT_S = 40.0


class BrokerProcess:
    """A broker that can be killed and started again at the same address, or stopped for a while."""

    def __init__(self, redis_url: str) -> None:
        self.address = free_address()
        self._command = [sys.executable, "-m", "console", "serve", "broker", f"redis_url={redis_url}"]
        self._command += ["--listen", self.address, "--log-level", "error"]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it and wait until it serves."""
        self._process = subprocess.Popen(self._command)  # noqa: ASYNC220 -- returns at once
        assert await rpc.wait_until_serving(self.address, timeout_s=START_TIMEOUT_S)

    def hold(self) -> None:
        """Stop it in its tracks."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def let_go(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(timeout=10)
            self._process = None
