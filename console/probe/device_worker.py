"""Measures one device, a GPU or a share of the CPUs, while all devices of the machine do the same: a child process.

The rates are of what PyTorch reaches: a large bfloat16 matrix product, a copy within the device's memory, sums over all
devices by gloo (CPUs) or NCCL (GPUs), as a trainer's processes add up gradients, and passes of a model's layers; of
GPUs also copies from and to page-locked memory of the machine, and inside it by the processors, as a trainer that
offloads makes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from console.probe.worker import Worker

_MATRIX = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the square matrices."""
_COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
"""More than a processor's caches hold."""
_SUM_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
_HOST_BYTES = 256 << 20
_MEET_S = 30.0
_MAX_ROUNDS = 100_000


def main() -> None:
    """Measure as the settings say."""
    worker = Worker()
    settings = worker.settings
    kind, rank, count, seconds = settings["kind"], settings["rank"], settings["count"], settings["seconds"]
    device = torch.device(kind, settings["device_index"]) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if count > 1:
        # By gloo in any case: its sums make all devices begin together, and NCCL's are measured last.
        store = (Path(settings["folder"]) / "store").as_uri()
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=_MEET_S)
        )
    with torch.inference_mode():
        _meet(count)
        worker.tell(tflops=_matrix_rate(device, seconds) / 1e12)
        _meet(count)
        worker.tell(copied_GBps=_copy_rate(device, seconds) / 1e9)
        if count > 1 and settings["sums"]:
            worker.tell(**_sums(device, count, seconds))
        if settings["host"]:
            _meet(count)
            worker.tell(host_link_GBps=_host_link_rate(device, seconds) / 1e9)
            _meet(count)
            worker.tell(host_copied_GBps=_copy_rate(torch.device("cpu"), seconds) / 1e9)
    if settings["passes"]:
        _measure_passes(worker, device, count, seconds)
    if count > 1:
        dist.destroy_process_group()


def _measure_passes(worker: Worker, device: torch.device, count: int, seconds: float) -> None:
    """A model that this version of transformers does not know costs nothing but these rates."""
    # Takes seconds.
    from console.probe.layer_passes import layer_passes

    _meet(count)
    try:
        for found in layer_passes(device, worker.settings["model"], lambda work: _seconds_each(work, device, seconds)):
            worker.tell(**found)
    except (OSError, ValueError) as error:
        worker.tell(passes_problem=str(error))


def _meet(count: int) -> None:
    if count > 1:
        dist.barrier()


def _matrix_rate(device: torch.device, seconds: float) -> float:
    """FLOP/s."""
    size = _MATRIX[device.type]
    one, other = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    result = torch.empty_like(one)
    return 2.0 * size**3 / _seconds_each(lambda: torch.mm(one, other, out=result), device, seconds)


def _copy_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second, read and written."""
    one = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    other = torch.empty_like(one)
    return 2.0 * _COPY_BYTES[device.type] / _seconds_each(lambda: other.copy_(one), device, seconds)


def _host_link_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second between a GPU and the machine's memory, in the slower direction."""
    here = torch.ones(_HOST_BYTES // 4).pin_memory()
    there = torch.empty_like(here, device=device)
    up_s = _seconds_each(lambda: there.copy_(here, non_blocking=True), device, seconds / 2)
    down_s = _seconds_each(lambda: here.copy_(there, non_blocking=True), device, seconds / 2)
    return _HOST_BYTES / max(up_s, down_s)


def _sums(device: torch.device, count: int, seconds: float) -> dict[str, object]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=_MEET_S))
    large = torch.zeros(_SUM_BYTES[device.type] // 4, device=device)
    small = torch.zeros(8, device=device)

    def rounds(tensor: torch.Tensor) -> float:
        return _seconds_each(lambda: dist.all_reduce(tensor, group=group), device, seconds / 2, is_together=True)

    bus_bytes = 2.0 * (count - 1) / count * _SUM_BYTES[device.type]
    return {"backend": backend, "bus_GBps": bus_bytes / rounds(large) / 1e9, "latency_us": rounds(small) * 1e6}


def _seconds_each(
    work: Callable[[], object], device: torch.device, seconds: float, *, is_together: bool = False
) -> float:
    """Mean time of a piece of work, after a first one that does not count.

    Rounds double until one takes half of the time allowed, so that waiting for a GPU's queue to empty does not count.
    `is_together`: all processes do as many, however long each takes.
    """
    work()
    num_rounds = 1
    while True:
        _finish(device)
        begin_s = time.perf_counter()
        for _ in range(num_rounds):
            work()
        _finish(device)
        took_s = time.perf_counter() - begin_s
        if is_together:
            slowest = torch.tensor([took_s])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            took_s = float(slowest[0])
        if took_s >= seconds / 2 or num_rounds >= _MAX_ROUNDS:
            return took_s / num_rounds
        num_rounds *= 2


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
