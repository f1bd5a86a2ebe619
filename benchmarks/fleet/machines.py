"""Defines the fleets: eight GPUs, alike as StreamRL's or mixed, and each one's number of concurrent samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet.workload import MAX_NEW_TOKENS, NUM_PROMPT_TOKENS
from penstock.batching.step_times import STREAMRL_TABLE, TableSteps
from services.generator.emulation.hardware import GPUS, MODELS
from services.generator.emulation.roofline import Roofline

FLEETS: dict[str, Sequence[str]] = {
    "alike": ("H800",) * 8,
    "unlike": ("H800", "H800", "H20", "H20", "A100-80", "A100-80", "A100-40", "L40S"),
}
SLOTS = {"kv_limited": 32, "roomy": 256}
"""Samples that an H800 decodes concurrently, by regime; others in proportion to the memory that the weights leave them.

With 128 samples for each GPU the first is a quarter of them and the second more than all.
"""
_REFERENCE = "H800"
_MODEL = MODELS["qwen2.5-7b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One emulated GPU: StreamRL's step times, slower or faster in proportion to memory bandwidth."""

    gpu: str
    max_samples: int
    slowdown: float

    @property
    def tokens_per_second(self) -> float:
        """Rate with all slots occupied."""
        times = TableSteps(table=STREAMRL_TABLE, slowdown=self.slowdown)
        return self.max_samples / times.step_s(self.max_samples, 0.0)

    def instance(self, *, run_id: str, lengths: Path, time_scale: float, tick_s: float) -> dict[str, Any]:
        """Its entry among the instances of a generator process."""
        return {
            "run_id": run_id,
            "engine": {
                "engine": "emulated",
                "max_concurrent_samples": self.max_samples,
                "max_context_tokens": MAX_NEW_TOKENS + NUM_PROMPT_TOKENS,
            },
            "emulated": {
                "steps": "streamrl",
                "slowdown": self.slowdown,
                "lengths": str(lengths),
                "time_scale": time_scale,
                "tick_s": tick_s,
            },
        }


def machines(fleet: str, regime: str) -> list[Machine]:
    """GPUs of a fleet in a regime."""
    reference_room = Roofline(gpu=GPUS[_REFERENCE], model=_MODEL).kv_capacity_tokens
    return [
        Machine(
            gpu=name,
            max_samples=round(
                SLOTS[regime] * Roofline(gpu=GPUS[name], model=_MODEL).kv_capacity_tokens / reference_room
            ),
            slowdown=GPUS[_REFERENCE].memory_bytes_per_second / GPUS[name].memory_bytes_per_second,
        )
        for name in FLEETS[fleet]
    ]
