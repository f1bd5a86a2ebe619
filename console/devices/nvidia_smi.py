"""Reads the NVIDIA GPUs of this machine, their MIG instances and who uses them, from two outputs of `nvidia-smi`.

`nvidia-smi -L` numbers the GPUs and alone names MIG instances; `nvidia-smi -q -x` has memory and processes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

COMMAND_TIMEOUT_S = 30.0
"""Without persistence mode the driver wakes up every GPU first, which takes seconds."""
SMALL_USER_MIB = 256
"""A process that holds less, such as the MPS server or a monitor, is not in the way; a model always holds more."""
BUSY_MIB = 1024
"""Memory in use from which a GPU is busy although no process is seen to compute on it, as from within a container."""
_GPU_LINE = re.compile(r"GPU (?P<index>\d+): (?P<name>.*) \(UUID: (?P<uuid>GPU-[\w-]+)\)")
_MIG_LINE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+(?P<index>\d+): \(UUID: (?P<uuid>MIG-[\w/-]+)\)")


class NvidiaSmiError(Exception):
    """`nvidia-smi` is there but does not answer; the message says how, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUser:
    """A process that computes on a device."""

    pid: int
    """As its own PID namespace or the host numbers it."""
    command: str
    """Its program, without the folder."""
    memory_mib: int | None = None
    """What it holds of the device; None if the driver does not say."""

    def __str__(self) -> str:
        memory = "" if self.memory_mib is None else f", {self.memory_mib} MiB"
        return f"{self.command} (process {self.pid}{memory})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """What a process can be given: a GPU, or one MIG instance of a GPU."""

    index: str
    """The GPU's number in nvidia-smi; for a MIG instance GPU/INSTANCE, such as 0/1."""
    uuid: str
    """GPU-... or MIG-..., as CUDA_VISIBLE_DEVICES takes it."""
    name: str
    """Product, with the profile of a MIG instance."""
    memory_mib: int | None = None
    """All of its memory; None if the driver does not say."""
    used_mib: int | None = None
    """Of that, in use."""
    users: tuple[GpuUser, ...] = ()
    """Processes that compute on it, as far as they can be seen from here."""

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG instance, which CUDA shows a process only alone and NCCL does not join."""
        return self.uuid.startswith("MIG-")

    @property
    def gpu_index(self) -> str:
        """Number of the GPU that it is, or is a part of."""
        return self.index.partition("/")[0]

    @property
    def use(self) -> str:
        """Who uses it, in words; empty if it is free."""
        users = [user for user in self.users if user.memory_mib is None or user.memory_mib >= SMALL_USER_MIB]
        if users:
            return ", ".join(map(str, users))
        is_busy = self.used_mib is not None and self.used_mib >= BUSY_MIB
        return f"{self.used_mib} MiB by processes that cannot be seen from here" if is_busy else ""


def read_devices() -> tuple[GpuDevice, ...] | None:
    """All devices in the driver's order; None without `nvidia-smi`. Raises NvidiaSmiError."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    listing = _output_of(command, "-L")
    if not _GPU_LINE.search(listing):
        return ()
    try:
        document = ElementTree.fromstring(_output_of(command, "-q", "-x"))
    except ElementTree.ParseError as error:
        raise NvidiaSmiError(f"nvidia-smi -q -x: {error}") from error
    return tuple(_devices(listing, {gpu.findtext("uuid", "").strip(): gpu for gpu in document.iter("gpu")}))


def _output_of(*command: str) -> str:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NvidiaSmiError(f"nvidia-smi does not answer within {COMMAND_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise NvidiaSmiError(f"nvidia-smi: {error}") from error
    if result.returncode != 0:
        # It reports its problems on standard output.
        said = (result.stdout.strip() or result.stderr.strip()).splitlines()
        raise NvidiaSmiError(f"nvidia-smi: {said[0] if said else f'status {result.returncode}'}")
    return result.stdout


def _devices(listing: str, details: dict[str, ElementTree.Element]) -> Iterator[GpuDevice]:
    gpu: re.Match[str] | None = None
    for line in listing.splitlines():
        if found := _GPU_LINE.match(line):
            gpu = found
            element = details.get(gpu["uuid"], ElementTree.Element("gpu"))
            if element.findtext("mig_mode/current_mig", "").strip() != "Enabled":
                yield _device(gpu["index"], gpu["uuid"], gpu["name"], memory=element, users=_users(element))
        elif gpu is not None and (found := _MIG_LINE.match(line)):
            name = f"{gpu['name']} MIG {found['profile']}"
            of_gpu = details.get(gpu["uuid"], ElementTree.Element("gpu"))
            instance = _instance(of_gpu, found["index"])
            index = f"{gpu['index']}/{found['index']}"
            yield _device(index, found["uuid"], name, memory=instance, users=_users(of_gpu, instance))


def _device(index: str, uuid: str, name: str, *, memory: ElementTree.Element, users: tuple[GpuUser, ...]) -> GpuDevice:
    return GpuDevice(
        index=index,
        uuid=uuid,
        name=name,
        memory_mib=_mib(memory.findtext("fb_memory_usage/total")),
        used_mib=_mib(memory.findtext("fb_memory_usage/used")),
        users=users,
    )


def _instance(gpu: ElementTree.Element, index: str) -> ElementTree.Element:
    found = (one for one in gpu.iter("mig_device") if one.findtext("index", "").strip() == index)
    return next(found, ElementTree.Element("mig_device"))


def _users(gpu: ElementTree.Element, instance: ElementTree.Element | None = None) -> tuple[GpuUser, ...]:
    """Processes that compute on a GPU, or on one instance of it; those that also draw (C+G) are a desktop's."""
    keys = ("gpu_instance_id", "compute_instance_id")
    place = None if instance is None else [instance.findtext(key, "").strip() for key in keys]
    found = []
    for process in gpu.iter("process_info"):
        is_here = place is None or place == [process.findtext(key, "").strip() for key in keys]
        pid = process.findtext("pid", "").strip()
        if is_here and pid.isdecimal() and process.findtext("type", "").strip() == "C":
            # It may be a whole command line.
            program = process.findtext("process_name", "").strip().split(" ")[0]
            command = program.rpartition("/")[2] or "a process"
            found.append(GpuUser(pid=int(pid), command=command, memory_mib=_mib(process.findtext("used_memory"))))
    return tuple(found)


def _mib(text: str | None) -> int | None:
    number, _, unit = (text or "").strip().partition(" ")
    return int(number) if unit == "MiB" and number.isdecimal() else None
