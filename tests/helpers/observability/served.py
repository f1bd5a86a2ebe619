"""Services as `penstock serve` starts them, each with its metrics, that a test breaks and mends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from penstock.network import rpc
from tests.helpers.console import COMMAND
from tests.helpers.faults.stage import Process
from tests.helpers.ports import free_address

START_TIMEOUT_S = 180.0
"""A process starts in seconds; beside many others on two cores, in more than a minute."""


class Served(Process):
    """A service's process, at the same addresses each time that it is started."""

    def __init__(
        self, service: str, folder: Path, *settings: str, name: str = "", variables: Mapping[str, str] | None = None
    ) -> None:
        self.service = service
        self.address = free_address()
        self.metrics = free_address()
        argv = [*COMMAND, "serve", service, f"metrics_listen={self.metrics}", *settings, "--listen", self.address]
        if variables:
            argv = ["env", *(f"{key}={value}" for key, value in variables.items()), *argv]
        super().__init__(name or service, argv, folder)

    @property
    def pid(self) -> int:
        """Of its process, whose main thread runs the event loop."""
        assert self._process is not None
        return self._process.pid

    async def until_serving(self) -> None:
        """Wait until it is healthy."""
        assert await rpc.wait_until_serving(self.address, timeout_s=START_TIMEOUT_S), f"{self.name} does not serve"


@contextmanager
def started(*services: Served) -> Iterator[None]:
    """The services run, and are killed at the end."""
    try:
        for service in services:
            service.start()
        yield
    finally:
        for service in services:
            service.kill()
