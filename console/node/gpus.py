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

    From `first_gpu` on. Empty where no generator decodes on GPUs, or where there is no `nvidia-smi`. Raises ConfigError
    if there are fewer than `gpus` says.
    """
    if not config.generator.engine.decodes_on_gpus():
        return ()
    try:
        devices = read_devices()
        given = given_devices(devices or (), os.environ.get(VARIABLE) if devices else None)
    except (NvidiaSmiError, ValueError) as error:
        raise ConfigError(str(error)) from error
    own = config.gpus - config.first_gpu
    if devices is not None and len(given) < own:
        after = f" from first_gpu {config.first_gpu} on" if config.first_gpu else ""
        raise ConfigError(f"gpus: {config.gpus}{after}, but this process is given {len(given)} by nvidia-smi; lower it")
    for device in given[:own]:
        kind = type_of(device.name, (device.memory_mib or 0) * 2**20)
        if kind != config.gpu and {kind, config.gpu} <= set(KNOWN):
            # Not refused: a problem may name its types as it likes.
            _log.warning("this machine has other GPUs than planned for; probe it", gpu=kind, planned=config.gpu)
        if device.use:
            # Not refused: they may be this machine's own generators, which still end after a restart.
            _log.warning("a GPU of this machine is in use", gpu=device.index, by=device.use)
    return given[:own]


def visible(indices: Sequence[int], gpus: Sequence[GpuDevice], *, first: int = 0) -> Mapping[str, str]:
    """The variables that show a process its GPUs, by their indices in the plan; `gpus` are those from `first` on."""
    if not gpus:
        return {VARIABLE: ",".join(str(index - first) for index in indices)}
    return visible_devices(gpus[index - first] for index in indices)
