"""Resident memory of processes, as the kernel counts it; MB of 1,000,000 bytes."""

from __future__ import annotations

from pathlib import Path


def resident_mb(pid: int | str = "self") -> float:
    """What a process has now."""
    return _status_mb(pid, "VmRSS")


def peak_mb(pid: int | str = "self") -> float:
    """The most that a process has had since it started, or since `restart_peak`."""
    return _status_mb(pid, "VmHWM")


def own_mb(pid: int | str = "self") -> float:
    """What a process has now without pages of files that it maps, which the kernel can take back."""
    return resident_mb(pid) - _status_mb(pid, "RssFile")


def restart_peak(pid: int | str = "self") -> None:
    """Count a process' peak from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def _status_mb(pid: int | str, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc says no {name} of process {pid}")
