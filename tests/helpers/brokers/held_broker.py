"""A broker in a process of its own whose event loop a test holds: `python -m` this module, LISTEN, REDIS_URL, FILE.

The loop is held from SIGUSR1 on, as by work that does not yield, as long as FILE exists. It then holds "held".
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.broker.config import BrokerConfig
from services.broker.server import serve


@dataclass(frozen=True, slots=True)
class HeldBroker:
    """Such a process."""

    process: subprocess.Popen[bytes]
    address: str
    file: Path

    @property
    def is_held(self) -> bool:
        """Whether its loop is held by now."""
        return self.file.read_text() == "held"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block nothing of its event loop runs."""
        self.file.write_text("")
        self.process.send_signal(signal.SIGUSR1)
        try:
            yield
        finally:
            self.file.unlink()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside the block nothing of the process runs."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def held_broker(folder: Path, redis_url: str, port: int) -> Iterator[HeldBroker]:
    """A broker on this port; it may not serve yet."""
    address, file = f"127.0.0.1:{port}", folder / "held"
    command = [sys.executable, "-m", __name__, address, redis_url, str(file)]
    process = subprocess.Popen(command)
    try:
        yield HeldBroker(process, address, file)
    finally:
        process.kill()
        process.wait()


async def _serve(listen: str, redis_url: str, file: Path) -> None:
    def hold(*_signal: object) -> None:
        file.write_text("held")
        while file.exists():
            time.sleep(0.01)

    # Python runs the handler in the thread of the loop, between two of its steps.
    signal.signal(signal.SIGUSR1, hold)
    await serve(BrokerConfig(listen=listen, redis_url=redis_url, insecure=True))


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
