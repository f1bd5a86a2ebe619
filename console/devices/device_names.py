"""Finds devices by the names that people and CUDA_VISIBLE_DEVICES use: an index, a UUID, or the beginning of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from console.devices.nvidia_smi import GpuDevice

VARIABLE = "CUDA_VISIBLE_DEVICES"


def find_device(name: str, devices: Iterable[GpuDevice]) -> list[GpuDevice]:
    """The device of that name; all instances if it is the index or UUID of a GPU in MIG mode; empty if there is none.

    The beginning of a UUID counts if it fits one device, as with CUDA.
    """
    devices = list(devices)
    if found := [device for device in devices if name in (device.index, device.uuid)]:
        return found
    if name.isdecimal():
        return [device for device in devices if device.gpu_index == name]
    found = [device for device in devices if name.startswith(("GPU-", "MIG-")) and device.uuid.startswith(name)]
    return found if len(found) == 1 else []


def given_devices(devices: Sequence[GpuDevice], visible: str | None) -> tuple[GpuDevice, ...]:
    """The devices that CUDA_VISIBLE_DEVICES gives to this process, in its order; all if it is unset.

    Numbers are those of nvidia-smi. Raises ValueError, one line, for what names no device: CUDA would silently leave
    out that one and all after it.
    """
    if visible is None:
        return tuple(devices)
    given: list[GpuDevice] = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        if name == "-1":
            break
        found = find_device(name, devices)
        if not found:
            there = ", ".join(device.index for device in devices) or "none"
            raise ValueError(f"{VARIABLE}: there is no GPU {name}; nvidia-smi shows {there}")
        given += [device for device in found if device not in given]
    return tuple(given)


def visible_devices(devices: Iterable[GpuDevice]) -> dict[str, str]:
    """The variables that show a process these devices and no others; by UUID, since CUDA's own numbers may differ."""
    return {VARIABLE: ",".join(device.uuid for device in devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
