"""A trainer that is killed at a stated moment: python -m tests.helpers.dying_trainer DOCUMENT.json MOMENT.

It kills itself with SIGKILL, at a place in the code instead of a time: nothing of it runs on, not even a finally.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.trainer import checkpoint
from services.trainer.rank_backend import RankBackend
from services.trainer.weight_publisher import WeightPublisher
from tests.helpers.training import running_trainer

MOMENTS = ("after a step", "in a checkpoint", "in a publication")
FATAL_STEP = 3
"""Of the run; with several optimiser steps a batch, "after a step" is after the third of those."""


def main() -> None:
    """Run until the moment; ends by signal, or with status 1 where the moment never came."""
    document, moment = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    arm(moment)
    asyncio.run(_run(document))
    sys.exit(1)


def arm(moment: str) -> None:
    """Patch this process so that it dies at that moment of step FATAL_STEP."""
    match moment:
        case "after a step":
            # Neither the broker nor a checkpoint has heard of it.
            _die_in(RankBackend, "optimizer_step", when=_third_call(), is_after=True)
        case "in a checkpoint":
            # Everything is on the disk but the marker.
            fatal = f"step_{FATAL_STEP}"
            _die_in(checkpoint, "_write_marker", when=lambda args, _: args[0].name == fatal, is_after=False)
        case "in a publication":
            _die_in(
                WeightPublisher,
                "publish",
                when=lambda _, kwargs: kwargs["policy_version"] == FATAL_STEP,
                is_after=False,
            )
        case unknown:
            raise ValueError(unknown)


def _die_in(owner: Any, name: str, *, when: Callable[[Any, Any], bool], is_after: bool) -> None:
    original = getattr(owner, name)

    def fatal(*args: Any, **kwargs: Any) -> Any:
        is_time = when(args, kwargs)
        if is_time and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if is_time:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, fatal)


def _third_call() -> Callable[[Any, Any], bool]:
    calls: list[None] = []

    def is_third(_args: Any, _kwargs: Any) -> bool:
        calls.append(None)
        return len(calls) == FATAL_STEP

    return is_third


async def _run(document: dict[str, Any]) -> None:
    async with running_trainer() as trainer:
        await trainer.start(document)
        await trainer.events(timeout_s=120)


if __name__ == "__main__":
    main()
