"""A trainer that is killed at a stated moment, in a process of its own.

It kills itself with SIGKILL, at a place in the code instead of a time: nothing of it runs on, not even a finally.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.clients.broker import BrokerClient
from services.trainer.checkpoints import checkpoint, rank_files
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.publishing import delta_maker
from services.trainer.publishing.publisher import WeightPublisher
from services.trainer.publishing.version_store import WeightStore
from services.trainer.run import prompt_feeder
from services.trainer.run.context import RunContext
from tests.helpers.trainers.training import run_alone
from tests.helpers.waiting import until

FATAL_STEP = 3
"""Of the run, unless a moment says otherwise."""
SUBMIT_BATCH_GROUPS = 2
"""So few that the data are not all read when the run is killed."""
PASSES_PER_STEP = 8
"""Of the run that is killed: every sample is a pack of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Before, or after, a call of `owner.name`: the first one that `is_it`."""

    owner: Any
    name: str
    is_it: Callable[[Any, Any], bool]
    """Of the call's arguments, by place and by name."""
    is_after: bool = False


def _nth(count: int) -> Callable[[Any, Any], bool]:
    calls: list[None] = []

    def is_nth(_args: Any, _kwargs: Any) -> bool:
        calls.append(None)
        return len(calls) == count

    return is_nth


def _named(prefix: str, *, place: int = 0) -> Callable[[Any, Any], bool]:
    return lambda args, _: os.path.basename(args[place]).startswith(prefix)


def _of_step(args: Any, kwargs: Any) -> bool:
    states = [each for each in (*args, *kwargs.values()) if isinstance(each, checkpoint.ResumeState)]
    return bool(states) and states[0].num_steps == FATAL_STEP


def _offered(args: Any, _kwargs: Any) -> bool:
    return bool(args[1].manifest.policy_version == FATAL_STEP)


_FILE = f"v{FATAL_STEP}-"
_FOLDER = f"step_{FATAL_STEP}"

IN_A_STEP = {
    "between two passes of the first step": Moment(
        owner=RankBackend, name="forward_backward", is_it=_nth(PASSES_PER_STEP // 2)
    ),
    "between two passes of a step": Moment(
        owner=RankBackend, name="forward_backward", is_it=_nth((FATAL_STEP - 1) * PASSES_PER_STEP + 4)
    ),
    # Neither the broker nor a checkpoint has heard of it.
    "after an optimiser step": Moment(owner=RankBackend, name="optimizer_step", is_it=_nth(FATAL_STEP), is_after=True),
    "after the broker heard of a step": Moment(
        owner=BrokerClient, name="ack_step", is_it=_nth(FATAL_STEP), is_after=True
    ),
    "after the broker heard of the first step": Moment(
        owner=BrokerClient, name="ack_step", is_it=_nth(1), is_after=True
    ),
}
IN_A_CHECKPOINT = {
    "before its state is copied": Moment(owner=checkpoint, name="begin", is_it=_of_step),
    "after its state was copied": Moment(owner=checkpoint, name="begin", is_it=_of_step, is_after=True),
    "with the model's files written": Moment(owner=checkpoint, name="_write_state", is_it=_of_step),
    "before it has its name": Moment(
        owner=checkpoint, name="_sync_tree", is_it=_named(f"{_FOLDER}.tmp"), is_after=True
    ),
    "with everything but its marker": Moment(owner=checkpoint, name="_write_marker", is_it=_named(_FOLDER)),
    "before older ones are deleted": Moment(owner=checkpoint, name="prune", is_it=_nth(FATAL_STEP)),
    "with an older one half deleted": Moment(owner=shutil, name="rmtree", is_it=_named(f"step_{FATAL_STEP - 1}")),
}
IN_A_PUBLICATION = {
    "before it begins": Moment(
        owner=WeightPublisher, name="publish", is_it=lambda _, kwargs: kwargs["policy_version"] == FATAL_STEP
    ),
    "before its file is written": Moment(owner=rank_files, name="write_together", is_it=_named(_FILE)),
    "before its file has its name": Moment(owner=os, name="replace", is_it=_named(_FILE, place=1)),
    "before it is offered": Moment(owner=WeightStore, name="add", is_it=_offered),
    "after it was offered": Moment(owner=WeightStore, name="add", is_it=_offered, is_after=True),
    "while its delta is made": Moment(owner=delta_maker, name="write_delta", is_it=_named(_FILE, place=1)),
    "before its delta is offered": Moment(owner=WeightStore, name="end_delta", is_it=_offered),
}
MOMENTS = {
    **{f"step: {name}": moment for name, moment in IN_A_STEP.items()},
    **{f"checkpoint: {name}": moment for name, moment in IN_A_CHECKPOINT.items()},
    **{f"publication: {name}": moment for name, moment in IN_A_PUBLICATION.items()},
    "resumption: after the run was opened again": Moment(
        owner=RunContext, name="open_run", is_it=_nth(1), is_after=True
    ),
}

# Forked from a process that imported PyTorch once and did nothing with it: a death then costs a second, not ten.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


async def run_until(moment: str, document: dict[str, Any], *, resume: bool = False) -> None:
    """A trainer's run up to that moment of MOMENTS, at which it was killed; AssertionError where that never came."""
    process = _processes.Process(target=_live_and_die, args=(document, moment, resume), daemon=True)
    await asyncio.to_thread(process.start)
    try:
        await until(lambda: process.exitcode is not None, timeout_s=200)
    finally:
        process.kill()
    assert process.exitcode == -signal.SIGKILL, f"the run ended with {process.exitcode} and never came to: {moment}"


def _live_and_die(document: dict[str, Any], moment: str, resume: bool) -> None:
    prompt_feeder.SUBMIT_BATCH_GROUPS = SUBMIT_BATCH_GROUPS
    _arm(MOMENTS[moment])
    asyncio.run(run_alone(document, resume=resume))
    sys.exit(1)


def _arm(moment: Moment) -> None:
    """Patch this process so that it dies at that moment."""
    original = getattr(moment.owner, moment.name)

    def fatal(*args: Any, **kwargs: Any) -> Any:
        is_time = moment.is_it(args, kwargs)
        if is_time and not moment.is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if is_time and inspect.isawaitable(result):
            return _and_die(result)
        if is_time:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(moment.owner, moment.name, fatal)


async def _and_die(awaitable: Any) -> None:
    await awaitable
    os.kill(os.getpid(), signal.SIGKILL)
