"""How often Python's cyclic garbage collector runs in a service's process."""

from __future__ import annotations

import gc

_RARELY = (20_000, 20, 50)
_AS_USUAL = (700, 10, 10)


def collect_rarely() -> None:
    """While libraries are imported, and in services whose calls leave few cycles.

    PyTorch and transformers make half a million objects, none of which is garbage: collecting meanwhile costs a sixth
    of the start of a process that imports both.
    """
    gc.set_threshold(*_RARELY)


def collect_as_usual() -> None:
    """From now on, where a cycle may hold large tensors."""
    gc.set_threshold(*_AS_USUAL)
