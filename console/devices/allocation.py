"""Decides which process gets which GPUs. Pure and deterministic.

Promises:
- No two processes share a device unless the configuration names it for both.
- What another run has is never given. What another program uses is given only where the configuration names it.
- A MIG instance is not given to a process that needs several devices or NCCL.
- Named devices come first, then processes of several devices, then the others; each takes the lowest free indices, all
  of one kind of GPU where there are enough.
- Whatever does not fit is a problem of one line; the rest is still placed, so that the table shows who has what.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType

from console.devices.device_names import find_device
from console.devices.nvidia_smi import GpuDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeed:
    """What one process needs."""

    process: str
    """Its name, such as generator-0."""
    count: int
    """Number of devices."""
    because: str
    """The settings that lead to this number, for messages."""
    fix: str
    """What would make it need fewer, for messages."""
    uses_nccl: bool = False
    """Whether it exchanges data with other processes by NCCL, even if it has one device."""
    named: tuple[str, ...] = ()
    """Devices that the configuration names for it; empty if they are chosen."""
    setting: str = "devices"
    """Key that names them."""

    @property
    def needs_whole_gpus(self) -> bool:
        """Whether MIG instances are of no use to it."""
        return self.count > 1 or self.uses_nccl


@dataclass(slots=True)
class DeviceAllocation:
    """Who gets what."""

    devices: dict[str, tuple[GpuDevice, ...]] = field(default_factory=dict)
    """Devices by process, in the order of its ranks."""
    problems: list[str] = field(default_factory=list)
    """Why something does not fit, one line each; empty if everything does."""
    unplaced: list[DeviceNeed] = field(default_factory=list)
    """What those lines are about."""

    def processes_on(self, device: GpuDevice) -> list[str]:
        """Processes that have a device."""
        return [process for process, devices in self.devices.items() if device in devices]


def allocate(
    needs: Sequence[DeviceNeed],
    devices: Sequence[GpuDevice],
    *,
    claimed: Mapping[str, str] = MappingProxyType({}),
    in_use: Mapping[str, str] = MappingProxyType({}),
) -> DeviceAllocation:
    """Give each process its devices.

    Args:
        needs: What the processes need, in the order of their importance.
        devices: The devices that may be used, in order.
        claimed: UUIDs of those that other runs have, and which.
        in_use: UUIDs of those that other programs use, and which.
    """
    taken = claimed.keys() | in_use.keys()
    allocation = DeviceAllocation()
    for need in sorted(needs, key=lambda need: (not need.named, not need.needs_whole_gpus)):
        found = _named(need, devices, claimed, allocation) if need.named else _chosen(need, devices, taken, allocation)
        if isinstance(found, str):
            allocation.problems.append(found)
            allocation.unplaced.append(need)
        else:
            allocation.devices[need.process] = found
    return allocation


def _chosen(
    need: DeviceNeed, devices: Sequence[GpuDevice], taken: Collection[str], allocation: DeviceAllocation
) -> tuple[GpuDevice, ...] | str:
    free = [device for device in devices if device.uuid not in taken and not allocation.processes_on(device)]
    usable = [device for device in free if not (device.is_mig and need.needs_whole_gpus)]
    if len(usable) < need.count:
        return _misfit(need, devices, taken, free=free, usable=usable)
    alike = (list(group) for _, group in groupby(sorted(usable, key=lambda one: one.name), key=lambda one: one.name))
    enough = [group for group in alike if len(group) >= need.count]
    order = list(devices).index
    best = min(enough, key=lambda group: order(group[0]), default=usable)
    return tuple(best[: need.count])


def _misfit(
    need: DeviceNeed,
    devices: Sequence[GpuDevice],
    taken: Collection[str],
    *,
    free: Sequence[GpuDevice],
    usable: Sequence[GpuDevice],
) -> str:
    reasons = []
    if num_taken := sum(device.uuid in taken for device in devices):
        reasons.append(f"{num_taken} in use by others")
    if len(free) > len(usable):
        reasons.append("MIG instances cannot be joined")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    left = f"{len(usable)} of {len(devices)} left{why}"
    return (
        f"devices: {need.process} needs {_gpus(need.count)} ({need.because}), {left}; "
        f"{need.fix}, or name GPUs to be shared: {need.setting}=[...]"
    )


def _named(
    need: DeviceNeed, devices: Sequence[GpuDevice], claimed: Mapping[str, str], allocation: DeviceAllocation
) -> tuple[GpuDevice, ...] | str:
    found: list[GpuDevice] = []
    for name in need.named:
        match find_device(name, devices):
            case [device]:
                found.append(device)
            case []:
                there = ", ".join(device.index for device in devices) or "none"
                return f"{need.setting}: there is no GPU {name} to be given; there are: {there}"
            case several:
                instances = ", ".join(device.index for device in several)
                return f"{need.setting}: GPU {name} is divided into MIG instances; name some of {instances}"
    return _refusal(need, found, claimed, allocation) or tuple(found)


def _refusal(
    need: DeviceNeed, found: Sequence[GpuDevice], claimed: Mapping[str, str], allocation: DeviceAllocation
) -> str:
    names = ", ".join(need.named)
    if len(found) != need.count or len(set(found)) != len(found):
        return (
            f"{need.setting}: {need.process} needs {need.count} different GPUs ({need.because}), not {names}; "
            f"name as many, or {need.fix}"
        )
    if need.needs_whole_gpus and any(device.is_mig for device in found):
        why = "NCCL does not join MIG instances" if need.uses_nccl else "a process sees one MIG instance at most"
        return f"{need.setting}: {need.process} cannot use {names}: {why}; name whole GPUs, or {need.fix}"
    if used := [device for device in found if device.uuid in claimed]:
        who = "; ".join(f"GPU {device.index} by {claimed[device.uuid]}" for device in used)
        return f"{need.setting}: taken: {who}; name other GPUs, or end that run"
    if need.uses_nccl and (others := [name for device in found for name in allocation.processes_on(device)]):
        return (
            f"{need.setting}: {need.process} shares a GPU with {others[0]}, which NCCL does not allow; "
            "name another, or set weights.transport: http"
        )
    return ""


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
