"""What disk and digest bear: the bytes of a version copied, written and digested by bare processes, and nothing else.

    python -m benchmarks.trainer.bare_publication MODEL.safetensors --processes 2 [--busy]

Each process holds its rows of every tensor in float32, copies them in the type of the file, writes them in their places
and, once all have, digests its share of tensors (SHA-256) and chunks (BLAKE3) from the file. Nothing is synced, as by
a trainer. With `--busy` as many other processes multiply matrices meanwhile, as a next step would. Prints seconds as
JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from penstock.model.digests import TensorPlace, digests_at, safetensors_places
from penstock.transfer.chunks import chunk_spans, chunks_at

TIMEOUT_S = 600.0
_processes = multiprocessing.get_context("spawn")


def measure_bare(model: Path, *, processes: int, repetitions: int, is_busy: bool) -> list[float]:
    """Seconds from the copy until the last digest, for each repetition."""
    barrier = _processes.Barrier(processes)
    ends = _processes.Queue()
    workers = [
        _processes.Process(target=_publish, args=(model, rank, processes, repetitions, barrier, ends), daemon=True)
        for rank in range(processes)
    ]
    others = [_processes.Process(target=_compute, daemon=True) for _ in range(processes if is_busy else 0)]
    for process in (*others, *workers):
        process.start()
    try:
        for worker in workers:
            worker.join(TIMEOUT_S)
            if worker.exitcode != 0:
                raise RuntimeError(f"a bare process ended with {worker.exitcode}")
    finally:
        for process in (*others, *workers):
            process.kill()
    spans = [ends.get(timeout=1) for _ in range(processes * repetitions)]
    found = []
    for number in range(repetitions):
        mine = [(begin, end) for each, begin, end in spans if each == number]
        found.append(max(end for _, end in mine) - min(begin for begin, _ in mine))
    return found


def _publish(model: Path, rank: int, num_ranks: int, repetitions: int, barrier: Barrier, ends: Any) -> None:
    import torch

    torch.set_num_threads(1)
    places = safetensors_places(model)
    held = [torch.ones(_rows(place, rank, num_ranks)[1]) for place in places]
    mine = _share(places, rank, num_ranks)
    target, size_bytes = model.with_name("bare.safetensors"), model.stat().st_size
    spans = chunk_spans(size_bytes)
    spans = spans[len(spans) * rank // num_ranks : len(spans) * (rank + 1) // num_ranks]
    for number in range(repetitions):
        if rank == 0:
            target.unlink(missing_ok=True)
            with target.open("wb") as file:
                file.truncate(size_bytes)
            # A trainer's last version has long been written back when the next one comes.
            os.sync()
        barrier.wait()
        begun_s = time.monotonic()
        copies = [torch.empty(each.shape, dtype=torch.bfloat16).copy_(each) for each in held]
        _write(target, [_rows(place, rank, num_ranks)[0] for place in places], copies)
        del copies
        barrier.wait()
        digests_at(target, mine)
        for _ in chunks_at(target, spans):
            pass
        ends.put((number, begun_s, time.monotonic()))
        barrier.wait()


def _write(target: Path, offsets: list[int], copies: list[Any]) -> None:
    import torch

    descriptor = os.open(target, os.O_WRONLY)
    try:
        for offset, copy in zip(offsets, copies, strict=True):
            content = memoryview(copy.view(torch.uint8).numpy())
            while content:
                num_written = os.pwrite(descriptor, content, offset)
                content, offset = content[num_written:], offset + num_written
    finally:
        os.close(descriptor)


def _rows(place: TensorPlace, rank: int, num_ranks: int) -> tuple[int, int]:
    """Where a process' rows of a tensor begin in the file, and how many elements they are."""
    rows = place.shape[0] if place.shape else 1
    width = math.prod(place.shape[1:])
    first, last = rows * rank // num_ranks, rows * (rank + 1) // num_ranks
    return place.begin + first * width * place.element_bytes, (last - first) * width


def _share(places: tuple[TensorPlace, ...], rank: int, num_ranks: int) -> list[TensorPlace]:
    """The tensors that a process digests, about as many bytes for each."""
    loads, shares = [0] * num_ranks, [[] for _ in range(num_ranks)]  # type: ignore[var-annotated]
    for place in sorted(places, key=lambda place: place.begin - place.end):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += place.end - place.begin
    return shares[rank]


def _compute() -> None:
    import torch

    torch.set_num_threads(1)
    matrix = torch.randn(1024, 1024)
    while True:
        matrix = torch.nn.functional.normalize(matrix @ matrix)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    found = measure_bare(
        options.model, processes=options.processes, repetitions=options.repetitions, is_busy=options.busy
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
