"""Draws who has which GPU, as lines of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table

from console.devices.nvidia_smi import GpuDevice
from console.devices.run_devices import RunDevices

_WIDTH = 118


def run_table(run: RunDevices) -> list[str]:
    """Each device of the machine with the process that gets it, and the processes that get none."""
    rows = [(device, _holder(run, device)) for device in run.devices]
    missing = [f"{need.process} needs {need.count}" for need in run.allocation.unplaced]
    return _drawn(rows, missing)


def summary_line(run: RunDevices) -> str:
    """Which process has which GPUs, in one line; empty if there are none."""
    parts = (
        f"{process} {', '.join(device.index for device in devices)}"
        for process, devices in sorted(run.allocation.devices.items())
    )
    text = "; ".join(parts)
    return f"GPUs: {text}" if text else ""


def machine_table(devices: Sequence[GpuDevice]) -> list[str]:
    """Each device of the machine with who uses it now."""
    return _drawn([(device, device.use or "free") for device in devices], [])


def _holder(run: RunDevices, device: GpuDevice) -> str:
    if processes := run.allocation.processes_on(device):
        return ", ".join(_place(run, process, device) for process in processes)
    if device not in run.given:
        return "not given: outside CUDA_VISIBLE_DEVICES"
    return f"in use: {run.taken[device.uuid]}" if device.uuid in run.taken else "free"


def _place(run: RunDevices, process: str, device: GpuDevice) -> str:
    devices = run.allocation.devices[process]
    return process if len(devices) == 1 else f"{process}, rank {devices.index(device)}"


def _drawn(rows: Sequence[tuple[GpuDevice, str]], missing: Sequence[str]) -> list[str]:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GPU")
    table.add_column("device")
    table.add_column("GiB", justify="right")
    table.add_column("process")
    for device, holder in rows:
        memory = "?" if device.memory_mib is None else f"{device.memory_mib / 1024:.0f}"
        table.add_row(device.index, device.name, memory, holder)
    for text in missing:
        table.add_row("none", "", "", text)
    output = StringIO()
    Console(file=output, width=_WIDTH, highlight=False, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in output.getvalue().splitlines() if line.strip()]
