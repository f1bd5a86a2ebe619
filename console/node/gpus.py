"""The GPUs of a machine that follows a plan, and how its processes are shown theirs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import structlog

from console.devices.device_names import VARIABLE, given_devices, visible_devices
from console.devices.gpu_types import KNOWN, type_of
from console.devices.nvidia_smi import GpuDevice, NvidiaSmiError, read_devices
from console.node.config import NodeConfig
from penstock.config import ConfigError

_log = structlog.get_logger()


def own_gpus(config: NodeConfig) -> tuple[GpuDevice, ...]:
    """The machine's GPUs as its plan counts them: those that CUDA_VISIBLE_DEVICES gives it, in that order.

    Empty where no generator decodes on GPUs, or where there is no `nvidia-smi`. Raises ConfigError if there are fewer
    than `gpus`.
    """
    if not config.generator.engine.decodes_on_gpus():
        return ()
    try:
        devices = read_devices()
        given = given_devices(devices or (), os.environ.get(VARIABLE) if devices else None)
    except (NvidiaSmiError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if devices is not None and len(given) < config.gpus:
        raise ConfigError(f"gpus: {config.gpus}, but this process is given {len(given)} by nvidia-smi; lower it")
    for device in given[: config.gpus]:
        kind = type_of(device.name, (device.memory_mib or 0) * 2**20)
        if kind != config.gpu and {kind, config.gpu} <= set(KNOWN):
            # Not refused: a problem may name its types as it likes.
            _log.warning("this machine has other GPUs than planned for; probe it", gpu=kind, planned=config.gpu)
        if device.use:
            # Not refused: they may be this machine's own generators, which still end after a restart.
            _log.warning("a GPU of this machine is in use", gpu=device.index, by=device.use)
    return given[: config.gpus]


def visible(indices: Sequence[int], gpus: Sequence[GpuDevice]) -> Mapping[str, str]:
    """The variables that show a process its GPUs, by their indices in the plan."""
    if not gpus:
        return {VARIABLE: ",".join(map(str, indices))}
    return visible_devices(gpus[index] for index in indices)
