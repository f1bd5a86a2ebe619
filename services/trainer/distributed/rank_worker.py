"""A process that trains beside the coordinator (process 0): makes the calls it is sent, until one says to close.

    build --> any of the calls of a Backend --> close

An error that is the same in all processes (BackendError) is answered; after any other this process is out of step with
the others, so it ends, and the coordinator with it.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from services.trainer.batches.packing import Pack
from services.trainer.distributed.process_group import Arrays, RankGroup
from services.trainer.model.backend import Backend, BackendError

_log = structlog.get_logger()


def follow(group: RankGroup, build: Callable[[str, RankGroup], Backend]) -> None:
    """Serves one run.

    Args:
        group: Joined.
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
            if call["op"] == "build":
                backend = build(call["config"], group)
            elif backend is not None:
                answer, results = _done(backend, call, arrays)
        except BackendError as error:
            answer = {"refused": str(error)}
        group.send(answer, results, to=0)


def _done(backend: Backend, call: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    """What to answer: values, and arrays."""
    match call["op"]:
        case "forward_backward":
            return {"totals": dataclasses.asdict(backend.forward_backward(decoded(arrays)))}, {}
        case "forward_logprobs" | "reference_logprobs" | "token_scores":
            return {}, scores(backend, pack=decoded(arrays), **call)
        case "optimizer_step":
            backend.optimizer_step(divisor=int(call["divisor"]), is_last=bool(call["is_last"]))
        case "refresh_reference":
            backend.refresh_reference()
        case "discard_gradients":
            backend.discard_gradients()
        case "gather":
            backend.state_tensors()
        case "save":
            # The coordinator hears from its own part of the save whether all parts were written.
            backend.save(Path(call["directory"]))
        case "load":
            backend.load(Path(call["directory"]))
        case unknown:
            raise ValueError(f"the coordinator asks for {unknown!r}: it runs another version of Penstock")
    return {}, {}


def scores(backend: Backend, op: str, pack: Pack | None, *, with_log_ratios: bool = False) -> Arrays:
    """The results of a call without gradients, for a pack's loss tokens."""
    if pack is None:
        raise ValueError(f"{op} came without a pack")
    if op == "forward_logprobs":
        return {"logprobs": backend.forward_logprobs(pack)}
    if op == "reference_logprobs":
        return {"logprobs": backend.reference_logprobs(pack)}
    found = backend.token_scores(pack, with_log_ratios=with_log_ratios)
    named = {"values": found.values, "log_ratios": found.log_ratios}
    return {name: array for name, array in named.items() if array is not None}


def encoded(pack: Pack | None) -> Arrays:
    """A pack as arrays, by the names of its fields; empty for none."""
    if pack is None:
        return {}
    parts = {field.name: getattr(pack, field.name) for field in dataclasses.fields(pack)}
    return {name: np.ascontiguousarray(part) for name, part in parts.items() if part is not None}


def decoded(arrays: Arrays) -> Pack | None:
    """The pack of `encoded`."""
    if not arrays:
        return None
    lists: dict[str, Any] = {name: tuple(arrays[name].tolist()) for name in ("segment_lengths", "members")}
    return Pack(**{**arrays, **lists})


def ignore_signals() -> None:
    """A stop signals all processes of a trainer; the coordinator needs the others for its last checkpoint."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
