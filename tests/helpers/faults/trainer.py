"""A trainer that trains nothing but keeps exact books, with Penstock's clients: python -m tests.helpers.faults.trainer.

Its checkpoint is a file that is replaced whole; it is written before the acknowledgement of a step, after it, or not at
all for that step, so that a kill ends in a rewind, a catch-up or neither. What its last checkpoint lists is the history
that survives.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from penstock.clients.broker import BrokerClient
from penstock.errors import LeaseLostError, UnknownSampleError, VersionConflictError
from penstock.v1 import broker_pb2
from tests.helpers.faults import workload

CONSUMER_ID = "trainer"
STEP_S = 0.1
MAX_SILENCE_S = 60.0
RESEND_SHARE = 0.2
STALLED = 3
"""Exit status where no group came for MAX_SILENCE_S."""


@dataclass(slots=True)
class Checkpoint:
    """The consumption cursor."""

    position: int = 0
    """Groups submitted."""
    steps: list[list[str]] = field(default_factory=list)
    """The groups of each step, from version 1 on."""

    @property
    def version(self) -> int:
        return len(self.steps)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        part = path.with_suffix(".part")
        with part.open("w") as file:
            json.dump({"position": self.position, "steps": self.steps}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def records(self) -> list[broker_pb2.StepRecord]:
        """The last steps, for OpenRun."""
        first = max(0, self.version - 64)
        return [
            broker_pb2.StepRecord(policy_version=version, group_ids=group_ids)
            for version, group_ids in enumerate(self.steps[first:], first + 1)
        ]


class Trainer:
    """One process of the run's trainer."""

    def __init__(self, client: BrokerClient, folder: Path, seed: int) -> None:
        self._client, self._folder = client, folder
        self._random = random.Random(seed)
        self._path = folder / "checkpoint.json"
        self._progress = Checkpoint.read(self._path)
        self._acked: list[tuple[int, list[str]]] = []
        self._session = client.consumer(
            workload.RUN_ID,
            CONSUMER_ID,
            max_groups=workload.GROUPS_PER_STEP,
            max_held_groups=workload.GROUPS_PER_STEP,
        )

    async def run(self) -> int:
        """Until the file `stop` is there; returns the exit status."""
        opened = await self._open()
        workload.note(self._folder, "opened", version=self._progress.version, history=opened.history)
        trained = {name for step in self._progress.steps for name in step}
        names = [workload.group_id(position) for position in range(self._progress.position)]
        await self._submit([name for name in names if name not in trained])
        async with self._session:
            while not (self._folder / "stop").exists():
                await self._feed()
                group_ids = await self._collect()
                if group_ids is None:
                    return STALLED
                await asyncio.sleep(STEP_S)
                await self._finish_step(group_ids)
                await self._send_again()
        self._progress.write(self._path)
        return 0

    async def _open(self) -> broker_pb2.OpenRunResponse:
        return await self._client.open_run(
            workload.RUN_ID,
            limits=workload.limits(),
            policy=workload.policy(),
            policy_version=self._progress.version,
            steps=self._progress.records(),
            takes_over=True,
        )

    async def _feed(self) -> None:
        books = await self._client.audit(workload.RUN_ID)
        num_missing = workload.NUM_GROUPS_AHEAD - books.in_flight // workload.GROUP_SIZE
        if num_missing > 0:
            first, self._progress.position = self._progress.position, self._progress.position + num_missing
            await self._submit([workload.group_id(position) for position in range(first, self._progress.position)])

    async def _submit(self, names: list[str]) -> None:
        for start in range(0, len(names), 64):
            prompts = [workload.prompt(name) for name in names[start : start + 64]]
            while errors := (await self._client.submit_prompts(workload.RUN_ID, prompts)).errors:
                prompts = [prompts[error.index] for error in errors if error.reason == "QUEUE_FULL"]
                for error in errors:
                    if error.reason != "QUEUE_FULL":
                        workload.note(self._folder, "violation", what=f"submit: {error.reason}: {error.message}")
                await asyncio.sleep(0.2)

    async def _collect(self) -> list[str] | None:
        """The groups of the next step, each looked at; None when none came for too long."""
        group_ids: list[str] = []
        trained = {name for step in self._progress.steps for name in step}
        while len(group_ids) < workload.GROUPS_PER_STEP:
            microbatch = await self._session.next(timeout_s=MAX_SILENCE_S)
            if microbatch is None:
                workload.note(self._folder, "stalled", reason=self._session.waiting_reason)
                return None
            for group in microbatch.groups:
                name = group.prompt.group_id
                problems = workload.problems_of(group, trainer_version=self._progress.version)
                if name in trained:
                    problems.append(f"{name}: handed out after it was trained on")
                for what in problems:
                    workload.note(self._folder, "violation", what=what)
                if any(trajectory.num_leases > 1 for trajectory in group.trajectories):
                    workload.note(self._folder, "continued", group_id=name)
                group_ids.append(name)
        return group_ids

    async def _finish_step(self, group_ids: list[str]) -> None:
        self._progress.steps.append(group_ids)
        choice = self._random.choice(("before", "after", "neither"))
        if choice == "before":
            self._progress.write(self._path)
        await self._acknowledge(group_ids)
        if choice == "after":
            self._progress.write(self._path)
        self._session.release(group_ids)

    async def _acknowledge(self, group_ids: list[str]) -> None:
        version = self._progress.version
        try:
            await self._client.ack_step(
                workload.RUN_ID, consumer_id=CONSUMER_ID, group_ids=group_ids, policy_version=version
            )
        except (VersionConflictError, UnknownSampleError, LeaseLostError) as error:
            workload.note(self._folder, "conflict", version=version, error=str(error))
            await self._open()
        self._acked.append((version, group_ids))

    async def _send_again(self) -> None:
        """An acknowledgement and a prompt of long ago, both of which the broker has: nothing may change."""
        if self._random.random() >= RESEND_SHARE:
            return
        version, group_ids = self._random.choice(self._acked)
        await self._client.ack_step(
            workload.RUN_ID, consumer_id=CONSUMER_ID, group_ids=group_ids, policy_version=version
        )
        await self._submit([self._random.choice(group_ids)])
        workload.note(self._folder, "resent", what="acknowledgement")


async def main(brokers: str, _name: str, folder: str, seed: str) -> int:
    """One process' life."""
    async with BrokerClient(brokers) as client:
        return await Trainer(client, Path(folder), int(seed)).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
