"""A process that trains beside the coordinator (process 0) and makes the calls it receives, up to `close`.

    compare, among machines --> build --> any of the calls of a Backend --> close

An error that is the same in all processes (BackendError) is sent back; after any other error this process is out of
step with the others, so it ends, and the coordinator with it.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from penstock.storage.addresses import stored_path
from services.trainer.batches.packing import Pack
from services.trainer.distributed.process_group import Arrays, RankGroup
from services.trainer.folders.same_files import away_from, difference
from services.trainer.model.backend import Backend, BackendError, LossTotals

CALLS = frozenset(
    (
        "forward_backward",
        "score",
        "optimizer_step",
        "refresh_reference",
        "discard_gradients",
        "state_tensors",
        "write_weights",
        "save",
        "upload",
        "load",
        "configure",
        "take_step",
    )
)
"""Methods of a `Backend`, or of a critic, that are called in all processes."""

_log = structlog.get_logger()


def follow(group: RankGroup, build: Callable[[str, RankGroup], Backend]) -> None:
    """Serves one run.

    Args:
        group: The joined group.
        build: Makes this process' part of the backend from a run's configuration as JSON.

    Raises:
        Exception: This process failed, or the coordinator has ended.
    """
    backend: Backend | None = None
    while True:
        call, arrays = group.receive(sender=0)
        if call["op"] == "close":
            if backend is not None:
                backend.close()
            return
        answer: dict[str, Any] = {}
        results: Arrays = {}
        try:
            if call["op"] == "compare":
                answer = {
                    "away": away_from(Path(call["path"])),
                    "difference": difference(stored_path(call["model"]), call["fingerprint"]),
                }
            elif call["op"] == "build":
                group.beside = None if call["beside"] is None else frozenset(call["beside"])
                backend = build(call["config"], group)
            elif backend is not None:
                answer, results = _done(backend, arrays, **call)
        except BackendError as error:
            answer = {"refused": str(error)}
        group.send(answer, results, to=0)


def _done(
    backend: Backend, arrays: Arrays, *, op: str, has_pack: bool, **details: Any
) -> tuple[dict[str, Any], Arrays]:
    """Makes the call; returns what the coordinator needs of its result: values, and arrays."""
    if op not in CALLS:
        raise ValueError(f"the coordinator asks for {op!r}: it runs another version of Penstock")
    packs = [decoded(arrays)] if has_pack else []
    details |= {name: stored_path(details[name]) for name in ("directory", "path", "source") if name in details}
    match getattr(backend, op)(*packs, **details):
        case LossTotals() as totals:
            reported = {"num_tokens": totals.num_tokens, "sums": totals.sums, "maxima": totals.maxima}
            return {"totals": reported}, {f"logprobs_{index}": each for index, each in enumerate(totals.logprobs)}
        case [numbers]:
            return {}, {"numbers": numbers}
        case _:
            # Of what is written, too: the coordinator hears from its own part whether all parts were.
            return {}, {}


def encoded(pack: Pack | None) -> Arrays:
    """A pack as arrays, by the names of its fields; empty for None."""
    if pack is None:
        return {}
    parts = {field.name: getattr(pack, field.name) for field in dataclasses.fields(pack)}
    return {name: np.ascontiguousarray(part) for name, part in parts.items() if part is not None}


def decoded(arrays: Arrays) -> Pack | None:
    """The pack that `encoded` turned into these arrays."""
    if not arrays:
        return None
    lists: dict[str, Any] = {name: tuple(arrays[name].tolist()) for name in ("segment_lengths", "members")}
    return Pack(**{**arrays, **lists})


def end_while_idle(is_busy: Callable[[], bool]) -> None:
    """End at once on a stop signal between runs; ignore it during one, as `ignore_signals` does."""

    def take(*_: object) -> None:
        if not is_busy():
            os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, take)


def ignore_signals() -> None:
    """Ignore stop signals, which all processes receive: the coordinator needs the others for its last checkpoint."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
