"""The GPUs of one run on this machine: what its processes need, what they get, and who else has some.

Nothing is assigned where no process of the run computes on a GPU, or where there is no `nvidia-smi`: all processes then
see what the console sees.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from console.config.config import DevicesOf, RunConfig
from console.devices.allocation import DeviceAllocation, DeviceNeed, allocate
from console.devices.device_names import VARIABLE, given_devices, visible_devices
from console.devices.gpu_claims import GpuClaims
from console.devices.gpu_types import type_of
from console.devices.nvidia_smi import GpuDevice, read_devices
from console.node.config import read_nodes
from penstock.collective.broadcast_backend import Transport
from penstock.config import ConfigError


@dataclass(slots=True, kw_only=True)
class RunDevices:
    """The devices of a run, claimed while it lasts."""

    devices: tuple[GpuDevice, ...]
    """All devices of the machine."""
    given: tuple[GpuDevice, ...]
    """Those that the run may use: all, or what CUDA_VISIBLE_DEVICES leaves."""
    taken: Mapping[str, str]
    """UUIDs of those that other runs have or other programs use, and who they are."""
    allocation: DeviceAllocation
    """Who gets what."""
    claims: GpuClaims

    def environment(self, process: str) -> dict[str, str]:
        """Variables that show a process of the run its own devices, or none."""
        return visible_devices(self.allocation.devices.get(process, ()))

    @property
    def types(self) -> dict[str, int]:
        """How many the run computes on, by type; MIG instances count as what they are."""
        used = {device.uuid: device for devices in self.allocation.devices.values() for device in devices}
        return dict(Counter(type_of(each.name, (each.memory_mib or 0) * 2**20) for each in used.values()))

    @property
    def notes(self) -> list[str]:
        """What a user should know of an assignment that fits, one line each."""
        shared = (
            (process, device)
            for process, devices in self.allocation.devices.items()
            for device in devices
            if device.uuid in self.taken
        )
        return [f"GPU {device.index} of {process} is not free: {self.taken[device.uuid]}" for process, device in shared]

    def claim(self) -> str:
        """Claim the devices of the run; returns why that fails, in one line, or nothing."""
        wanted = {device.uuid: device for devices in self.allocation.devices.values() for device in devices}
        others = self.claims.claim(wanted)
        if not others:
            return ""
        self.claims.release()
        who = "; ".join(f"GPU {wanted[uuid].index}: {holder}" for uuid, holder in others.items())
        return f"devices: taken by others since the checks: {who}; start again"


def survey(config: RunConfig) -> RunDevices | None:
    """The devices of this run as of now; None if it needs none, or the machine has no `nvidia-smi`.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES or the configuration names what is not there.
        NvidiaSmiError: `nvidia-smi` does not answer.
    """
    if not (needs := list(_needs(config))):
        return None
    devices = read_devices()
    if devices is None:
        return None
    try:
        given = given_devices(devices, os.environ.get(VARIABLE))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not given:
        # PyTorch falls back to the CPU where it may.
        is_fixed = config.trainer.device == "cuda"
        needs = [need for need in needs if is_fixed or not need.process.startswith(("trainer", "critic", "scorer-"))]
    claims = GpuClaims(f"run {config.run.id} (process {os.getpid()})")
    in_use = {device.uuid: device.use for device in given if device.use}
    claimed = claims.others(device.uuid for device in given)
    allocation = allocate(needs, given, claimed=claimed, in_use=in_use)
    return RunDevices(devices=devices, given=given, taken=in_use | claimed, allocation=allocation, claims=claims)


def _needs(config: RunConfig) -> Iterator[DeviceNeed]:
    uses_nccl = config.weights.transport == Transport.NCCL
    num_ranks = len(config.trainer.shares)
    if config.endpoints.trainer is None and _trains_on_gpus(config):
        yield DeviceNeed(
            process="trainer",
            count=num_ranks,
            because=f"trainer.processes: {num_ranks}",
            fix="lower trainer.processes" if num_ranks > 1 else "set trainer.device: cpu",
            uses_nccl=uses_nccl,
            named=_named(config, "trainer"),
            setting="devices.trainer",
        )
    yield from _scorer_needs(config)
    if config.starts_critic and _trains_on_gpus(config):
        yield DeviceNeed(
            process="critic",
            count=config.num_critic_processes,
            because="algorithm.critic: service",
            fix="set algorithm.critic: trainer, or trainer.device: cpu",
            named=_named(config, "critic"),
            setting="devices.critic",
        )
    if config.starts_generators and config.generator.decodes_on_gpus():
        yield from _generator_needs(config, uses_nccl=uses_nccl)
    if named := _named(config, "reward"):
        yield DeviceNeed(
            process="reward",
            count=len(named),
            because="devices.reward",
            fix="leave devices.reward out",
            named=named,
            setting="devices.reward",
        )
    for path, node in read_nodes(config.scheduler.nodes).items():
        if node.generator.engine.decodes_on_gpus():
            yield DeviceNeed(
                process=f"node-{path.stem.removeprefix('node-')}",
                count=node.gpus,
                because=f"gpus: {node.gpus} in {path}",
                fix="lower gpus there",
            )


def _scorer_needs(config: RunConfig) -> Iterator[DeviceNeed]:
    if not _trains_on_gpus(config):
        return
    named = _named(config, "scorers")
    if named and len(named) != config.num_scorers:
        raise ConfigError(f"devices.scorers: names {len(named)} GPUs; scorers is {config.num_scorers}")
    for index in range(config.num_scorers):
        yield DeviceNeed(
            process=f"scorer-{index}",
            count=1,
            because="algorithm.reference: service",
            fix="lower scorers, or set trainer.device: cpu",
            named=named[index : index + 1],
            setting="devices.scorers",
        )


def _generator_needs(config: RunConfig, *, uses_nccl: bool) -> Iterator[DeviceNeed]:
    section = config.generator
    degree = section.tensor_parallel * section.pipeline_parallel
    named = _named(config, "generators")
    if named and len(named) != degree * section.count:
        raise ConfigError(
            f"devices.generators: names {len(named)} GPUs; generator.count {section.count} x tensor_parallel "
            f"{section.tensor_parallel} x pipeline_parallel {section.pipeline_parallel} need {degree * section.count}"
        )
    for index in range(section.count):
        yield DeviceNeed(
            process=f"generator-{index}",
            count=degree,
            because=f"tensor_parallel {section.tensor_parallel} x pipeline_parallel {section.pipeline_parallel}",
            fix="lower generator.count" if section.count > 1 else "lower generator.tensor_parallel",
            uses_nccl=uses_nccl,
            named=named[index * degree : (index + 1) * degree],
            setting="devices.generators",
        )


def _named(config: RunConfig, component: DevicesOf) -> tuple[str, ...]:
    return tuple(map(str, config.devices.get(component, ())))


def _trains_on_gpus(config: RunConfig) -> bool:
    return config.trainer.device == "cuda" or (config.trainer.device == "auto" and is_torch_built_for_cuda())


def is_torch_built_for_cuda() -> bool:
    """Whether the installed PyTorch can use NVIDIA GPUs. Reads a file of it: the console does not import torch."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / "version.py"
        if path.is_file() and re.search(r"^cuda\b[^=]*= *['\"]", path.read_text(encoding="utf-8"), re.MULTILINE):
            return True
    return False
