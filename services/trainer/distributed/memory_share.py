"""How much memory of their machine the processes of a trainer can still have, each."""

from __future__ import annotations

import os

from penstock.memory.machine_memory import available_bytes
from services.trainer.distributed.launch import Place


def memory_share(num_ranks: int) -> int:
    """What this machine, or container, still has for each of the `num_ranks` processes that run on it, bytes."""
    place = Place.read(os.environ)
    return available_bytes() // (place.num_local_ranks if place else num_ranks)
