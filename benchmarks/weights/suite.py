"""Runs all measurements of weight transfer and reports for `penstock bench weights`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scratch import MEMORY_FOLDER, scratch_folder
from benchmarks.weights import delta, full, site, swap
from benchmarks.weights.swap_models import small_model

MB = 1_000_000
ROOM_FACTOR = 3
"""Copies of the largest content: at the origin, and two at its destination."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    full_sizes_bytes: dict[int, int]
    """Size to repetitions."""
    delta_size_bytes: int
    delta_repetitions: int
    site_size_bytes: int
    site_bytes_per_second: float
    site_delay_s: float
    site_repetitions: int
    swap_hidden_size: int
    swap_num_layers: int
    swap_num_updates: int


FULL = Plan(
    full_sizes_bytes={10 * MB: 25, 100 * MB: 15, 500 * MB: 7, 2000 * MB: 5},
    delta_size_bytes=256 * 1024**2,
    delta_repetitions=3,
    site_size_bytes=40 * MB,
    site_bytes_per_second=20 * MB,
    site_delay_s=0.03,
    site_repetitions=3,
    swap_hidden_size=512,
    swap_num_layers=8,
    swap_num_updates=9,
)
QUICK = Plan(
    full_sizes_bytes={10 * MB: 1},
    delta_size_bytes=8 * 1024**2,
    delta_repetitions=1,
    site_size_bytes=4 * MB,
    site_bytes_per_second=20 * MB,
    site_delay_s=0.005,
    site_repetitions=1,
    swap_hidden_size=64,
    swap_num_layers=2,
    swap_num_updates=2,
)


async def run(plan: Plan, *, engine: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything, swaps in `engine` (one of swap.ENGINES); `progress` receives status messages."""
    with scratch_folder(_place(plan)) as folder:
        result: dict[str, Any] = {
            "full": await full.measure(folder, sizes_bytes=plan.full_sizes_bytes, progress=progress)
        }
        progress("delta: made and applied")
        deltas = delta.measure(size_bytes=plan.delta_size_bytes, num_repetitions=plan.delta_repetitions)
        result["delta"] = {"bytes_ratio": deltas["bf16_2_percent_random"]["bytes_ratio"], **deltas}
        progress("link: a site behind a shaped link")
        result["link"] = await site.measure(
            folder,
            size_bytes=plan.site_size_bytes,
            bytes_per_second=plan.site_bytes_per_second,
            delay_s=plan.site_delay_s,
            num_repetitions=plan.site_repetitions,
        )
        progress(f"swap: new weights while samples are decoded with {engine}")
        result["swap"] = await swap.measure(
            folder,
            engine=engine,
            model=small_model(hidden_size=plan.swap_hidden_size, num_layers=plan.swap_num_layers),
            num_updates=plan.swap_num_updates,
        )
    return result | {"link_copies": result["link"]["link_copies"], "swap_pause_ms": result["swap"]["pause_ms"]}


def _place(plan: Plan) -> Path | None:
    """Memory if it has space, otherwise the temporary folder."""
    needed_bytes = ROOM_FACTOR * max(plan.full_sizes_bytes)
    has_room = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > 2 * needed_bytes
    return MEMORY_FOLDER if has_room else None
