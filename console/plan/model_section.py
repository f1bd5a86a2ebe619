"""The model of a planning problem, from a Hugging Face folder, and what a decode step costs beside reading it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from console.probe.probe_file import Decode, Probe
from penstock.config import Document
from penstock.model.model_shape import read_numbers
from services.scheduler.problem.cost_constants import CostConstants

_UNLIKE = 2.0
"""Ratio of the largest to the smallest fixed time of a step from which a note says that machines differ."""


def model_section(folder: Path, missing: list[str]) -> Document:
    """The section `model`; its numbers are those of config.json and the headers of safetensors files."""
    try:
        return {"name": folder.name, **read_numbers(folder)}
    except (OSError, ValueError) as error:
        missing.append(f"model: {error}; give --model the folder with config.json and *.safetensors, as downloaded")
        return {}


def pass_constants(probes: Sequence[Probe], notes: list[str]) -> Document:
    """Keys of `cost_model`: shares of the matrix rate that passes without and with gradients reach, by GPU type.

    Types whose machines did not measure them keep the cost model's shares, which are of the peak on data sheets.
    """
    shares: dict[str, dict[str, list[float]]] = {"mfu_infer": {}, "mfu_train": {}}
    for probe in probes:
        if probe.passes is None or probe.matrix_tflops_bf16 is None or probe.accelerators is None:
            continue
        rates = {"mfu_infer": probe.passes.forward_tflops, "mfu_train": probe.passes.forward_backward_tflops}
        for key, rate in rates.items():
            shares[key].setdefault(probe.accelerators.kind, []).append(rate / probe.matrix_tflops_bf16)
    found: Document = {}
    for key, by_kind in shares.items():
        measured = {kind: float(median(values)) for kind, values in by_kind.items()}
        if faster := [kind for kind, share in measured.items() if share > 1]:
            notes.append(f"{key}: passes were faster than the matrix product on {', '.join(faster)}; planned as fast")
        if measured:
            found[key] = getattr(CostConstants(), key) | {kind: min(1.0, share) for kind, share in measured.items()}
    return found


def decode_constants(probes: Sequence[Probe], notes: list[str]) -> Document:
    """Keys of `cost_model`: the fixed time of a decode step, and the time of each sequence in it.

    They are what a line through the measured steps has left after the time in which the cost model reads and computes
    at the machine's measured rates. One pair stands for all machines: the medians. A machine whose steps were faster
    than its rates allow says nothing, as they were not measured under the same load.
    """
    fits = {
        probe.name: _overheads(probe.decode, probe.matrix_tflops_bf16, probe.memory_GBps)
        for probe in probes
        if probe.decode is not None and probe.matrix_tflops_bf16 is not None and probe.memory_GBps is not None
    }
    for name in [name for name, found in fits.items() if not found[0]]:
        notes.append(f"{name} decoded faster than the rates measured on it allow, so its decode steps are not used")
        del fits[name]
    if not fits:
        return {}
    fixed = {name: found[0] for name, found in fits.items()}
    if max(fixed.values()) > _UNLIKE * min(fixed.values()):
        each = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in fixed.items())
        notes.append(f"the fixed time of a decode step differs ({each}); the cost model has one, so the median is used")
    return {
        "step_overhead_s": float(median(fixed.values())),
        "sequence_overhead_s": float(median(found[1] for found in fits.values())),
    }


def offload_constants(probes: Sequence[Probe]) -> Document:
    """Keys of `cost_model` for trainers that offload, by the slowest machine; those that no probe has are left out."""
    found = {
        "host_link_GBps": [probe.host_link_GBps for probe in probes if probe.host_link_GBps is not None],
        "host_memory_GBps": [probe.host_memory_GBps for probe in probes if probe.host_memory_GBps is not None],
    }
    return {key: min(rates) for key, rates in found.items() if rates}


def _overheads(decode: Decode, tflops: float, memory_GBps: float) -> tuple[float, float]:
    """Seconds a step and seconds a sequence, neither below 0; least squares of relative errors."""
    constants = CostConstants()
    read_s = decode.params * decode.weight_bytes / (memory_GBps * 1e9 * constants.eta_bw)
    compute_s = 2 * decode.params / (tflops * 1e12 * constants.eta_fl)
    batch = np.array([point.batch for point in decode.points], np.float64)
    measured = np.array([point.step_s for point in decode.points], np.float64)
    left = measured - np.maximum(read_s, batch * compute_s)
    columns = np.stack([np.ones_like(batch), batch], axis=1)
    fits = [np.zeros(2)]
    # The best of: both, either alone, none. With two unknowns that is all that a bound at 0 can do.
    for used in ([0, 1], [0], [1]):
        fit = np.zeros(2)
        fit[used] = np.linalg.lstsq(columns[:, used] / measured[:, None], left / measured, rcond=None)[0]
        if (fit >= 0).all():
            fits.append(fit)
    best = min(fits, key=lambda fit: float((((columns @ fit - left) / measured) ** 2).sum()))
    return float(best[0]), float(best[1])
