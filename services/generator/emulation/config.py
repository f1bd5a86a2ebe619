"""What an emulated engine emulates."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config import StrictModel


class EmulatedConfig(StrictModel):
    """What an emulated engine emulates."""

    gpu: str | None = None
    """A GPU by name (H800, H20, A100-80, L40S ...; `engine.tensor_parallel` of them), whose step times follow from
    bandwidth, FLOPs and memory; unset keeps to `engine.emulated_tokens_per_second` whatever the batch."""
    model: str = "qwen2.5-7b"
    """The model that `gpu` would run: qwen2.5-1.5b, -7b, -32b or -72b."""
    steps: Literal["gpu", "streamrl"] = "gpu"
    """gpu; or streamrl for the decode steps by batch size that StreamRL measured (a 7B model on one H800). With the
    latter `gpu` gives prefill and KV room only."""
    slowdown: float = Field(default=1.0, gt=0, le=1000)
    """Every step and prefill takes this many times as long."""
    kv_capacity_tokens: int | None = Field(default=None, ge=2)
    """KV room; what the GPU's memory leaves beside the weights when unset, unbounded without a GPU."""
    lengths: Literal["lognormal", "streamrl"] | Path = "lognormal"
    """Completion lengths: log-normal around `engine.emulated_mean_tokens`; StreamRL's histogram of a reasoning model
    (828 to 19,884 tokens); or a text file, one length a line: a sample with seed s replays line s modulo all."""
    length_scale: float = Field(default=1.0, gt=0, le=1000)
    """StreamRL's lengths are multiplied by this."""
    time_scale: float = Field(default=1.0, gt=0, le=10_000)
    """Emulated seconds in a real one: 20 decodes twenty times as fast as the GPU would."""
    tick_s: float = Field(default=0.01, gt=0, le=10)
    """How often tokens come out, in real time; longer ticks cost less CPU. A sample's end comes out at once."""
