"""A fake `nvidia-smi` that answers with outputs in the format of the real one, for machines of several kinds.

Written after published outputs of the driver series 535 to 575 (schema nvsmi_device_v12): names, order, units and the
places where it says N/A are theirs; UUIDs are made up, and parts that nobody reads (clocks, PCI, ECC) are left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-40GB"
L4 = "NVIDIA L4"
_MIB = {H100: 81559, A100: 40960, L4: 23034}


@dataclass(frozen=True, kw_only=True)
class Process:
    """A row of the table of processes."""

    pid: int
    name: str = "/usr/bin/python3"
    kind: str = "C"
    mib: int | None = 30000
    instance: str = "N/A"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU of the machine; `instances` are the profiles and MiB of its MIG instances."""

    name: str = H100
    used_mib: int = 4
    processes: Sequence[Process] = ()
    instances: Sequence[tuple[str, int]] = ()
    is_mig: bool = field(default=False)


def uuid_of(index: int, instance: int | None = None) -> str:
    """The UUID that the fake gives a GPU, or one of its MIG instances."""
    if instance is None:
        return f"GPU-{index:08d}-4a1f-9c0e-77aa-5d0f6c1e2b3{index}"
    return f"MIG-{index:08d}-{instance:04d}-5c3d-8f21-6a7b8c9d0e1f"


def install_nvidia_smi(folder: Path, cards: Sequence[Card]) -> str:
    """Writes the fake into `folder`; returns the PATH that finds it first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "listing.txt").write_text(_listing(cards))
    (folder / "query.xml").write_text(_query(cards))
    _write_command(
        folder,
        'case "$*" in\n'
        f'  -L) cat "{folder}/listing.txt" ;;\n'
        f'  "-q -x") cat "{folder}/query.xml" ;;\n'
        "  *) echo \"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\"; exit 2 ;;\n"
        "esac\n",
    )
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def install_broken_nvidia_smi(folder: Path) -> str:
    """One that answers as after a driver update without a restart."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_command(folder, 'echo "Failed to initialize NVML: Driver/library version mismatch"\nexit 18\n')
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def _write_command(folder: Path, body: str) -> None:
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{body}")
    command.chmod(0o755)


def _listing(cards: Sequence[Card]) -> str:
    lines = []
    for index, card in enumerate(cards):
        lines.append(f"GPU {index}: {card.name} (UUID: {uuid_of(index)})")
        for number, (profile, _) in enumerate(card.instances):
            lines.append(f"  MIG {profile:<11} Device {number:>2}: (UUID: {uuid_of(index, number)})")
    return "".join(f"{line}\n" for line in lines) or "No devices found.\n"


def _query(cards: Sequence[Card]) -> str:
    gpus = "".join(_gpu(index, card) for index, card in enumerate(cards))
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        "\t<timestamp>Mon Nov  3 09:12:44 2025</timestamp>\n\t<driver_version>575.57.08</driver_version>\n"
        f"\t<cuda_version>12.9</cuda_version>\n\t<attached_gpus>{len(cards)}</attached_gpus>\n{gpus}</nvidia_smi_log>\n"
    )


def _gpu(index: int, card: Card) -> str:
    is_mig = bool(card.is_mig or card.instances)
    total = _MIB[card.name]
    used, free = ("N/A", "N/A") if is_mig else (f"{card.used_mib} MiB", f"{total - card.used_mib} MiB")
    mode = "Enabled" if is_mig else "N/A" if card.name == L4 else "Disabled"
    instances = "".join(
        f"""
			<mig_device>
				<index>{number}</index>
				<gpu_instance_id>{number + 7}</gpu_instance_id>
				<compute_instance_id>0</compute_instance_id>
				<fb_memory_usage>
					<total>{mib} MiB</total>
					<reserved>0 MiB</reserved>
					<used>12 MiB</used>
					<free>{mib - 12} MiB</free>
				</fb_memory_usage>
			</mig_device>"""
        for number, (_, mib) in enumerate(card.instances)
    )
    processes = "".join(map(_process, card.processes))
    return f"""	<gpu id="00000000:{index + 17:02X}:00.0">
		<product_name>{card.name}</product_name>
		<mig_mode>
			<current_mig>{mode}</current_mig>
			<pending_mig>{mode}</pending_mig>
		</mig_mode>
		<mig_devices>{instances or " None"}
		</mig_devices>
		<uuid>{uuid_of(index)}</uuid>
		<minor_number>{index}</minor_number>
		<fb_memory_usage>
			<total>{total} MiB</total>
			<reserved>551 MiB</reserved>
			<used>{used}</used>
			<free>{free}</free>
		</fb_memory_usage>
		<compute_mode>Default</compute_mode>
		<processes>{processes}
		</processes>
	</gpu>
"""


def _process(process: Process) -> str:
    memory = "N/A" if process.mib is None else f"{process.mib} MiB"
    return f"""
			<process_info>
				<gpu_instance_id>{process.instance}</gpu_instance_id>
				<compute_instance_id>{"N/A" if process.instance == "N/A" else "0"}</compute_instance_id>
				<pid>{process.pid}</pid>
				<type>{process.kind}</type>
				<process_name>{process.name}</process_name>
				<used_memory>{memory}</used_memory>
			</process_info>"""
