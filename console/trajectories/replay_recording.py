"""Implements `penstock replay`: puts a recording's groups into another run in the order of their training.

Promises:
- Never more than one step's worth of replayed groups waits in the run, so each is trained from the version it was put
  under: its staleness is the recorded one (see `recording.rebase`), as long as the run trains on nothing else.
- A group is put once, even if a replay is repeated: the run recognises its name.
- Groups that could not be put are counted and reported, and the exit status is then 1.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from console.inspect.find_run import find_run
from console.recording.reader import RecordedGroup, read_groups
from console.recording.rebase import Rebased, rebase
from penstock.clients.broker import BrokerClient
from penstock.clients.policy_watch import PolicyWatch
from penstock.clients.trajectories import TrajectorySession
from penstock.config import ConfigError
from penstock.errors import PenstockError
from penstock.security import Security
from penstock.v1 import broker_pb2, types_pb2

PREFIX = "replay-"
"""Prefix of replayed groups' names: a run of the same trainer names its own groups as the recorded run did."""
PATIENCE_S = 600.0
_EXIT_OK, _EXIT_INCOMPLETE = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of a replay."""

    run_id: str
    """The run that gets the groups."""
    prefix: str = PREFIX
    """Prefix of the groups' names."""
    from_offset: int = 0
    """Groups skipped at the beginning."""
    from_version: int = 0
    """Groups of earlier steps are skipped."""
    patience_s: float = PATIENCE_S
    """How long the run may stay at one version while groups wait to be put."""


@dataclass(slots=True, kw_only=True)
class Replayed:
    """Progress of a replay."""

    num_groups: int = 0
    """Groups handed to the broker."""
    num_samples: int = 0
    """Samples that were new to the run."""
    num_known: int = 0
    """Samples that the run already had."""
    num_unscored: int = 0
    """Samples without a score, skipped."""
    num_clipped: int = 0
    """Samples whose oldest version would have fallen below 0."""
    problems: list[str] = field(default_factory=list)
    """Why groups were not put: the first few reasons."""
    num_refused: int = 0
    """Groups that were not put."""

    def refuse(self, problem: str) -> None:
        """Record a group that was not put."""
        self.num_refused += 1
        if len(self.problems) < 5:
            self.problems.append(problem)


def replay_command(file: Path, options: ReplayOptions, *, broker: str) -> int:
    """Put a recording into a run; returns the exit status. Raises ConfigError."""
    target = find_run(options.run_id, broker=broker, runs_dir=Path())
    assert target.broker is not None
    result = Replayed()
    try:
        asyncio.run(_connected(file, options, target.broker, result))
    except PenstockError as error:
        raise ConfigError(f"{error} (after {result.num_groups} groups)") from error
    print(_summary(file, options, result))
    for problem in result.problems:
        print(f"not put: {problem}", file=sys.stderr)
    return _EXIT_INCOMPLETE if result.num_refused else _EXIT_OK


async def _connected(file: Path, options: ReplayOptions, broker: str, result: Replayed) -> None:
    async with BrokerClient(broker, security=Security.from_environment(), patience_s=0.0) as client:
        await replay(client, file, options, result=result)


async def replay(broker: BrokerClient, file: Path, options: ReplayOptions, *, result: Replayed) -> None:
    """Put the groups of a recording into the run and update `result`. Raises PenstockError and RecordingError."""
    run = await broker.get_run(options.run_id)
    producer_id = f"replay-{file.name}"[:128]
    groups = _chosen(file, options)
    async with (
        PolicyWatch(broker, run_id=options.run_id) as watch,
        TrajectorySession(broker, run_id=options.run_id, producer_id=producer_id, max_unanswered=1) as session,
    ):
        replayer = _Replayer(run, options, watch, session, result)
        for first in groups:
            version, room = await replayer.room()
            await replayer.put([first, *islice(groups, room - 1)], version)


def _chosen(file: Path, options: ReplayOptions) -> Iterator[RecordedGroup]:
    late = (group for group in read_groups(file) if group.policy_version >= options.from_version)
    return islice(late, options.from_offset, None)


class _Replayer:
    """Puts groups one step's worth at a time, each once the run has trained on the previous one."""

    def __init__(
        self,
        run: broker_pb2.GetRunResponse,
        options: ReplayOptions,
        watch: PolicyWatch,
        session: TrajectorySession,
        result: Replayed,
    ) -> None:
        self._limits = run.limits
        self._options = options
        self._watch = watch
        self._session = session
        self._result = result
        self._first_version = run.policy_version
        self._num_added = 0
        """Groups that were new to the run; their steps are waited for."""

    async def room(self) -> tuple[int, int]:
        """The run's version, and how many groups may be put under it, as soon as one fits."""
        per_step = self._limits.groups_per_step
        first_with_room = self._first_version + self._num_added // per_step
        version = await self._watch.at_least(first_with_room, timeout_s=self._options.patience_s)
        room = (version - self._first_version + 1) * per_step - self._num_added
        return version, min(room, per_step)

    async def put(self, batch: list[RecordedGroup], version: int) -> None:
        """Put groups as of a version."""
        groups: list[types_pb2.TrajectoryGroup] = []
        for recorded in batch:
            rebased = rebase(recorded, policy_version=version, prefix=self._options.prefix)
            if not self._limits.HasField("routing"):
                for trajectory in rebased.group.trajectories:
                    trajectory.ClearField("routes")
            if self._is_fit(rebased):
                groups.append(rebased.group)
        if groups:
            await self._send(groups)

    def _is_fit(self, rebased: Rebased) -> bool:
        result, name = self._result, rebased.group.prompt.group_id
        result.num_unscored += rebased.num_unscored
        if rebased.staleness > self._limits.max_staleness:
            most = f"the run allows {self._limits.max_staleness}: open it with a larger max_staleness"
            result.refuse(f"group {name}: was {rebased.staleness} versions old when it was trained, {most}")
        elif not rebased.group.trajectories:
            result.refuse(f"group {name}: none of its samples has a score")
        else:
            result.num_clipped += rebased.num_clipped
            return True
        return False

    async def _send(self, groups: list[types_pb2.TrajectoryGroup]) -> None:
        result = self._result
        receipt = await self._session.store(groups)
        refused = {error.index for error in receipt.refused}
        for error in receipt.refused:
            result.refuse(f"group {groups[error.index].prompt.group_id}: {error.message}")
        sizes = [len(group.trajectories) for index, group in enumerate(groups) if index not in refused]
        result.num_groups += len(sizes)
        result.num_samples += receipt.num_samples
        result.num_known += sum(sizes) - receipt.num_samples
        # Which groups were known is not reported: counting more than were added could wait for a step in vain.
        self._num_added += receipt.num_samples // max(sizes, default=1)
        if sys.stderr.isatty():
            print(f"\r{result.num_groups} groups, {result.num_samples} samples", end="", file=sys.stderr, flush=True)


def _summary(file: Path, options: ReplayOptions, result: Replayed) -> str:
    parts = [f"{file}: {result.num_groups} groups, {result.num_samples} samples put into {options.run_id}"]
    for number, words in (
        (result.num_known, "samples were already there"),
        (result.num_unscored, "samples have no score and were skipped"),
        (result.num_clipped, "samples were sampled before the run's version 0 and count as version 0"),
        (result.num_refused, "groups were not put"),
    ):
        if number:
            parts.append(f"{number} {words}")
    return "; ".join(parts)
