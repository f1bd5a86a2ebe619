"""What vLLM's workers find when each compares its part of a model with a file, and what follows for the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict


class Comparison(TypedDict):
    """Of one worker; a plain dictionary, as vLLM passes it between processes."""

    differing: list[str]
    """Tensors in which its part differs, and tensors that it holds and the file lacks."""
    equal: list[str]
    """The file's tensors that its part matches."""


def mismatched_tensors(found: Sequence[Comparison], names: Iterable[str]) -> list[str]:
    """The tensors that differ in some worker, and those of `names` that no worker holds."""
    differing = {name for worker in found for name in worker["differing"]}
    return sorted(differing | (set(names) - {name for worker in found for name in worker["equal"]}))
