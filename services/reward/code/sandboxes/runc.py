"""A sandbox of containers without an engine: one for each program, made by `runc`, which Docker uses, too.

A container's bundle, its `config.json` of the OCI runtime specification 1.0.2, is made here: an engine takes several
times the CPU time of what it starts (docs/rewards.md).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.reward.code.sandboxes.containers import (
    STARTING_PIDS,
    Container,
    kept,
    own_user,
    seen_paths,
    start_container,
)
from services.reward.code.sandboxes.refused_calls import AF_UNIX, CLONE_NEW, ON_PROCESSES, REFUSED
from services.reward.code.sandboxes.sandbox import Limits, Place, SandboxError, require

_QUIET = ("/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh")
"""A container has the error output of runc, which writes its own errors there."""
_MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list"),
    *("/proc/timer_stats", "/proc/sched_debug", "/proc/scsi"),
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


class RuncSandbox:
    """By `runc`. Raises SandboxError where it is missing, or may not be used."""

    def __init__(self) -> None:
        require("runc", "runc", "prlimit", "setpriv", "timeout")
        if os.geteuid() != 0:
            raise SandboxError("runc: only root may use it; use sandlock or bubblewrap, which need no root")
        self._runc = str(shutil.which("runc"))

    def start(self, argv: Sequence[str], *, place: Place, limits: Limits) -> Container:
        """Start a program; returns once its container has started."""
        name = f"penstock-code-{secrets.token_hex(8)}"
        with contextlib.ExitStack() as stack:
            bundle = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bundle-")))
            (bundle / "rootfs").mkdir()
            (bundle / "config.json").write_text(json.dumps(_bundle(argv, place, limits)))
            held = stack.pop_all()
        run = [self._runc, "run", "--bundle", str(bundle), name]
        kill = [self._runc, "kill", name, "KILL"]
        return start_container(run, kill=kill, folder=place.folder, held=held)


def _bundle(argv: Sequence[str], place: Place, limits: Limits) -> dict[str, Any]:
    user = own_user()
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": user, "gid": user},
            "args": [*_QUIET, *kept(argv, limits)],
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "cwd": str(place.folder),
            "noNewPrivileges": True,
            "capabilities": {},
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "nosuid", "noexec", "mode=755", "size=64k"),
            *(_mount(path, "bind", "bind", "ro", "nosuid", "nodev") for path in seen_paths(place)),
        ],
        "linux": {
            "namespaces": [{"type": each} for each in ("pid", "network", "ipc", "uts", "mount")],
            "resources": {
                "memory": {"limit": limits.memory_bytes, "swap": limits.memory_bytes},
                "pids": {"limit": STARTING_PIDS},
                "cpu": {"quota": 100_000, "period": 100_000},
            },
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [
                    _refused(REFUSED, errno.EPERM),
                    _refused(ON_PROCESSES, errno.EPERM, [{"index": 0, "op": "SCMP_CMP_NE", "value": 0}]),
                    _refused(["socket"], errno.EPERM, [{"index": 0, "op": "SCMP_CMP_NE", "value": AF_UNIX}]),
                    *(_refused(["clone"], errno.EPERM, [_with_flag(flag)]) for flag in _bits(CLONE_NEW)),
                    # Its flags cannot be seen here; libraries then take `clone`.
                    _refused(["clone3"], errno.ENOSYS),
                ],
            },
            "maskedPaths": _MASKED,
            "readonlyPaths": _READ_ONLY,
        },
    }


def _mount(path: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": path, "source": path if kind == "bind" else kind, "type": kind, "options": options}


def _refused(names: Sequence[str], number: int, arguments: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number, "args": arguments}


def _with_flag(flag: int) -> dict[str, Any]:
    return {"index": 0, "op": "SCMP_CMP_MASKED_EQ", "value": flag, "valueTwo": flag}


def _bits(flags: int) -> list[int]:
    return [1 << index for index in range(flags.bit_length()) if flags >> index & 1]
