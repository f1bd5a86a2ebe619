"""How long a producer may stay silent before it counts as stuck. Pure.

A limit follows from the longest completion a run allows and from the measured speed of its generators, unless it is
configured; a component that gives up at a limit reports its value, where that comes from and how to set it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.v1 import broker_pb2

COMPLETIONS = 3
"""Of the longest kind, one after the other, at the slowest generator: a sample may wait for another one's slot, and be
begun again elsewhere."""
MOST_DERIVED_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimit:
    """A limit with its explanation."""

    value_s: float
    origin: str
    """The origin of the value, and how to set another."""

    def __str__(self) -> str:
        """For example: 4915 s (3 x 32768 tokens at 20 tokens/s of gen-1; trainer.max_silence_s sets another)."""
        return f"{self.value_s:g} s ({self.origin})"


def silence_limit(
    *, setting: str, configured_s: float | None, least_s: float, max_tokens: int, speeds: Mapping[str, float]
) -> SilenceLimit:
    """The limit that applies now.

    Args:
        setting: Names the option that sets it.
        configured_s: Its value; None to derive one.
        least_s: A derived limit is never less; it is this where nothing was measured.
        max_tokens: Length of the longest completion.
        speeds: Tokens per second of one sample, by generator; those measured.
    """
    if configured_s is not None:
        return SilenceLimit(value_s=configured_s, origin=f"as {setting} says")
    if not speeds:
        origin = f"the least, as no generator was seen to decode; {setting} sets another"
        return SilenceLimit(value_s=least_s, origin=origin)
    slowest, speed = min(speeds.items(), key=lambda item: item[1])
    derived_s = min(MOST_DERIVED_S, COMPLETIONS * max_tokens / speed)
    why = f"{COMPLETIONS} x {max_tokens} tokens at {speed:.3g} tokens/s of {slowest}"
    if derived_s <= least_s:
        why = f"the least, more than {why}"
    return SilenceLimit(value_s=round(max(least_s, derived_s)), origin=f"{why}; {setting} sets another")


def sample_speed(view: broker_pb2.GeneratorView) -> float | None:
    """Tokens per second of each sample that a generator decodes; None if not measured."""
    if view.measured_tokens_per_second <= 0:
        return None
    return view.measured_tokens_per_second / max(1, view.beat.num_running)


def sample_speeds(views: Iterable[broker_pb2.GeneratorView]) -> dict[str, float]:
    """The same for all measured generators, by id."""
    return {view.hello.generator_id: speed for view in views if (speed := sample_speed(view)) is not None}
