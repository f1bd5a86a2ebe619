"""Measures the ideal overlap: one core generates with vLLM, one trains, and neither waits or does anything else."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import environment, run_child

TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Samples per second of each side alone on one core."""

    generation: float
    training: float

    @property
    def ideal(self) -> float:
        """Rate that both together could reach with a core each: the slower one's."""
        return min(self.generation, self.training)


async def measure(model_dir: Path, recording: Path, folder: Path) -> Alone:
    """Measure both over the samples of `recording`, one after the other. Raises RuntimeError if one fails."""
    document = json.dumps({"model_dir": str(model_dir), "recording": str(recording)})
    found: dict[str, float] = {}
    for side in ("generation", "training"):
        out = folder / f"{recording.stem}-{side}.json"
        await run_child(
            *(sys.executable, "-m", "benchmarks.e2e.alone", side, document, str(out)),
            timeout_s=TIMEOUT_S,
            what=f"{side} alone",
            log=folder / f"{side}.log",
            env=environment(num_threads=1),
        )
        found[side] = json.loads(out.read_text(encoding="utf-8"))["samples_per_second"]
    return Alone(generation=found["generation"], training=found["training"])
