"""Writes the page of a GPU check, as Markdown."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import groupby

from benchmarks.gpu.checks import ROOT, Check, Outcome
from console.devices.nvidia_smi import GpuDevice
from penstock.process.packages import installed_version

PACKAGES = ("torch", "vllm", "transformers", "triton", "flashinfer-python", "nvidia-nccl-cu13")


def versions() -> dict[str, str]:
    """What ran: this project's commit, Python, the packages that matter, CUDA and the driver."""
    import torch

    found = {"penstock": _output("git", "describe", "--always", "--dirty"), "python": platform.python_version()}
    found |= {name: version for name in PACKAGES if (version := installed_version(name)) is not None}
    found["CUDA of torch"] = torch.version.cuda or "none: a build for CPUs"
    found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    return {name: version for name, version in found.items() if version}


def page(checks: Sequence[Check], devices: Sequence[GpuDevice], versions: Mapping[str, str], *, now_s: float) -> str:
    """The whole page.

    Args:
        checks: What was run, file by file.
        devices: The machine's GPUs.
        versions: What ran, by name.
        now_s: Unix seconds of the check.
    """
    counts = {outcome: sum(check.outcome is outcome for check in checks) for outcome in Outcome}
    lines = [
        f"# GPU check of {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now_s))}",
        "",
        ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + ".",
        "",
        *_table(("GPU", "device", "GiB", "in use by others before"), map(_device_row, devices)),
        *_table(("what", "version"), versions.items()),
    ]
    for file, of_file in groupby(checks, key=lambda check: check.file):
        lines += [f"## {file}", "", *_table(("check", "result", "s", "figures, or why not"), map(_check_row, of_file))]
    return "\n".join(lines).rstrip("\n") + "\n"


def _device_row(device: GpuDevice) -> tuple[str, ...]:
    memory = "?" if device.memory_mib is None else f"{device.memory_mib / 1024:.0f}"
    return device.index, device.name, memory, device.use or "nobody"


def _check_row(check: Check) -> tuple[str, ...]:
    figures = "; ".join(f"{name}: {value}" for name, value in check.figures)
    return check.name or "the file", check.outcome, f"{check.seconds:.1f}", check.reason or figures


def _table(headings: Sequence[str], rows: object) -> list[str]:
    assert hasattr(rows, "__iter__")
    cells = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in cells] + [""]


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _output(*command: str) -> str:
    """What a command says; empty if it fails or is not there."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()
