"""A sandbox service in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.network.rpc import service_of
from services.reward.code.cell import Job, Verdict
from services.reward.code.cells import Cells, LocalCells
from services.reward.code.config import ProgramsConfig
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.reasoning_gym.scorers import Answer, LocalScorers
from services.reward.sandbox.service import SandboxServicer
from tests.helpers.serving import serving


class ScriptedCells:
    """Run nothing: they give one verdict, raise one error, or never answer."""

    def __init__(self, answer: Verdict | Exception | None) -> None:
        self.answer = answer
        self.jobs: list[Job] = []
        self.is_cancelled = asyncio.Event()

    async def run(self, job: Job, *, deadline_s: float) -> Verdict:
        """The verdict."""
        self.jobs.append(job)
        if isinstance(self.answer, Verdict):
            return self.answer
        if self.answer is not None:
            raise self.answer
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled.set()
        raise AssertionError("unreachable")

    async def check(self) -> str:
        """Nothing."""
        return ""

    async def probe(self) -> None:
        """Nothing."""

    async def close(self) -> None:
        """Nothing."""


class ScriptedScorers(LocalScorers):
    """Scores nothing: gives one answer, or raises one error."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        self.version = "0.0"
        self.answer = answer
        self.asked: list[Answer] = []

    async def score(self, answer: Answer, *, deadline_s: float) -> dict[str, Any]:
        """The answer."""
        self.asked.append(answer)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@asynccontextmanager
async def sandbox_service(
    programs: ProgramsConfig, cells: Cells | None = None, scorers: LocalScorers | None = None
) -> AsyncIterator[str]:
    """Its address; runs programs in `cells`, by default in the first sandbox that works here."""
    kind = "scripted"
    if cells is None:
        kind, _ = find_sandbox("auto")
        cells = LocalCells(kind, programs.num_cells)
    try:
        servicer = SandboxServicer(cells, sandbox=kind, programs=programs, scorers=scorers)
        async with serving(service_of(servicer)) as (_, target):
            yield target
    finally:
        await cells.close()
