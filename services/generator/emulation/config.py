"""Configures the hardware, speed and completion lengths that an emulated engine emulates."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config import StrictModel


class EmulatedConfig(StrictModel):
    """Configuration of an emulated engine's hardware, speed and lengths."""

    gpu: str | None = None
    """A GPU by name (H800, H20, A100-80, L40S ...; `engine.tensor_parallel` of them), whose step times follow from
    bandwidth, FLOPs and memory; when unset, `engine.emulated_tokens_per_second` applies at every batch size."""
    model: str = "qwen2.5-7b"
    """The model that `gpu` would run: qwen2.5-1.5b, -7b, -32b or -72b."""
    steps: Literal["gpu", "streamrl"] = "gpu"
    """gpu; or streamrl for the decode times by batch size that StreamRL measured (a 7B model on one H800). With
    streamrl, `gpu` determines only prefill times and KV capacity."""
    slowdown: float = Field(default=1.0, gt=0, le=1000)
    """Multiplies the time of every step and prefill."""
    kv_capacity_tokens: int | None = Field(default=None, ge=2)
    """KV capacity; when unset, the GPU memory left beside the weights, or unbounded without a GPU."""
    lengths: Literal["lognormal", "streamrl"] | Path = "lognormal"
    """Completion lengths: log-normal around `engine.emulated_mean_tokens`; StreamRL's histogram of a reasoning model
    (828 to 19,884 tokens); or a text file with one length per line: seed s replays line s modulo their number."""
    length_scale: float = Field(default=1.0, gt=0, le=1000)
    """Multiplies StreamRL's lengths."""
    time_scale: float = Field(default=1.0, gt=0, le=10_000)
    """Emulated seconds per real second: 20 decodes twenty times as fast as the GPU would."""
    tick_s: float = Field(default=0.01, gt=0, le=10)
    """Real time between token outputs; longer ticks cost less CPU. A sample's end is output at once."""
