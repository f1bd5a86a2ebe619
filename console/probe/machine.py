"""What this machine is: its devices, RAM, versions, and whether other work takes part of it."""

from __future__ import annotations

import fcntl
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import penstock
from console.devices.device_names import VARIABLE, given_devices
from console.devices.gpu_types import type_of
from console.devices.nvidia_smi import GpuDevice, NvidiaSmiError, read_devices
from console.probe.probe_file import Accelerators, Load
from penstock.config import ConfigError
from penstock.memory.machine_memory import PROC, total_bytes
from penstock.process.packages import ENGINE_PACKAGES, installed_version

OTHERS_BUSY, STOLEN_BUSY = 0.1, 0.05
"""Shares of the machine's CPU time from which other processes, or other guests of its host, make it busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices to measure."""

    accelerators: Accelerators | None
    """None: a host."""
    gpus: tuple[GpuDevice, ...] = ()
    """Empty where the CPUs are the devices."""

    @property
    def num_threads(self) -> int:
        """CPU threads for each device."""
        return max(1, num_cores() // (self.accelerators.count if self.accelerators is not None else 1))


def num_cores() -> int:
    """CPU cores that a process may use here."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_machine(num_cpu_devices: int | None) -> Machine:
    """The GPUs that CUDA_VISIBLE_DEVICES gives this process; without any, the CPUs as equal devices, or a host.

    Raises ConfigError: its GPUs are not alike, or cannot be read, or there are fewer cores than devices.
    """
    try:
        found = read_devices() or ()
        gpus = given_devices(found, os.environ.get(VARIABLE) if found else None)
    except (NvidiaSmiError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if not gpus:
        return Machine(accelerators=None if num_cpu_devices is None else _cpus(num_cpu_devices))
    if num_cpu_devices is not None:
        raise ConfigError(
            f"--cpu-devices: this machine has {len(gpus)} GPUs; leave it out, or hide them with {VARIABLE}="
        )
    return Machine(accelerators=_gpus(gpus), gpus=gpus)


@contextmanager
def measured_alone(folder: Path | None = None) -> Iterator[None]:
    """Hold the lock by which one probe of this user measures the machine at a time; `folder` is the machine's own.

    Raises ConfigError: another one measures.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"penstock-{os.getuid()}-probe.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "of a moment ago"
            raise ConfigError(
                f"another penstock probe measures this machine (process {holder}); wait until it has ended, as both "
                "would find half of what there is"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _gpus(gpus: Sequence[GpuDevice]) -> Accelerators:
    kinds = Counter((gpu.name, gpu.memory_mib) for gpu in gpus)
    if len(kinds) > 1:
        names = ", ".join(f"{count} x {name}" for (name, _), count in kinds.items())
        raise ConfigError(
            f"GPUs: {names}; a probe is of equal ones: name those of one kind in {VARIABLE}, and probe each kind under "
            "a --name of its own"
        )
    gpu = gpus[0]
    if gpu.memory_mib is None:
        raise ConfigError(f"GPU {gpu.index}: nvidia-smi does not say its memory; update the driver")
    memory_bytes = gpu.memory_mib * 2**20
    return Accelerators(type="gpu", kind=type_of(gpu.name, memory_bytes), count=len(gpus), memory_GB=memory_bytes / 1e9)


def _cpus(count: int) -> Accelerators:
    cores = num_cores()
    if count > cores:
        raise ConfigError(f"--cpu-devices: {count} for {cores} cores; at most one device a core")
    # Not "cpu": a run registers the console's machine under that kind, which is not one of the plan's.
    kind = f"{_processor()}, {cores // count} cores"
    return Accelerators(type="cpu", kind=kind, count=count, memory_GB=total_bytes() / count / 1e9)


def _processor() -> str:
    try:
        lines = (PROC / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return (next(named, "") or platform.processor() or platform.machine() or "CPU")[:80]


def versions() -> dict[str, str]:
    """Of what was measured with."""
    engines = (name for packages in ENGINE_PACKAGES.values() for name in packages)
    found = {name: installed_version(name) for name in ("torch", *engines)}
    return {
        "penstock": penstock.__version__,
        "python": platform.python_version(),
        **{name: version for name, version in found.items() if version is not None},
    }


class LoadMeter:
    """Watches the machine's CPU time from its creation on.

    Args:
        proc: Where the kernel reports it; without that, as on systems other than Linux, nothing is seen.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._begin = _cpu_times(proc)
        self._own_begin = _own_seconds()
        self._load_average = os.getloadavg()[0]

    def load(self) -> Load:
        """The load since then; children of this process count as its own once they have ended."""
        ticks = os.sysconf("SC_CLK_TCK")
        spent = [now - before for now, before in zip(_cpu_times(self._proc), self._begin, strict=True)]
        total = sum(spent)
        if total <= 0:
            return Load(load_average=self._load_average, others=0.0, stolen=0.0)
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = spent
        used = user + nice + system + interrupts + soft
        own = (_own_seconds() - self._own_begin) * ticks
        return Load(
            load_average=self._load_average,
            others=min(1.0, max(0.0, used - own) / total),
            stolen=min(1.0, max(0.0, stolen) / total),
        )


def busy_reasons(load: Load, gpus: Sequence[GpuDevice]) -> list[str]:
    """Why rates that were measured meanwhile are too low, one line each; empty if they are not."""
    reasons = []
    if load.others > OTHERS_BUSY:
        reasons.append(
            f"other processes used {load.others:.0%} of the CPUs (load average before: {load.load_average:.1f})"
        )
    if load.stolen > STOLEN_BUSY:
        reasons.append(f"the machine's host gave {load.stolen:.0%} of the CPUs to others")
    reasons += [f"GPU {gpu.index} is used by {gpu.use}" for gpu in gpus if gpu.use]
    return reasons


def _cpu_times(proc: Path) -> list[int]:
    """Ticks of user, nice, system, idle, waiting for disks, interrupts, soft interrupts, stolen."""
    try:
        first = (proc / "stat").read_text(encoding="ascii").split("\n", 1)[0]
        numbers = [int(word) for word in first.split()[1:9]]
    except (OSError, ValueError):
        return [0] * 8
    return numbers if len(numbers) == 8 else [0] * 8


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
