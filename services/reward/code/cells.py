"""Where programs run: in child processes here (`LocalCells`), or elsewhere (`remote_cells`)."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from services.reward.code.cell import Job, Verdict
from services.reward.code.row_tests import START_TIMEOUT_S
from services.reward.code.sandboxes.sandbox import SandboxError
from services.reward.code.suites import Assertions, Streams
from services.reward.models.child import Child, ChildEndedError, Children

MAX_LINE_BYTES = 64 * 1024
SLACK_S = 60.0
"""For making and ending sandboxes, beside what programs may take: an engine's containers need most of it on a machine
with other work."""
_OUTLIVES_S = 120.0
"""How much longer than its own time a program may have waited for its tests' sandbox, or that have been kept."""


class Cells(Protocol):
    """Run programs."""

    async def run(self, job: Job, *, deadline_s: float) -> Verdict:
        """How a program did.

        Raises:
            TimeoutError: No verdict by `deadline_s` of the event loop's clock, or within what its tests may take.
            SandboxError: Nothing is known of the program.
            ModelAwayError: Programs cannot be run at present.
        """

    async def check(self) -> str:
        """Where programs run, in words. Raises RewardLoadError and ModelAwayError."""

    async def probe(self) -> None:
        """Return when programs can be run. Raises ModelAwayError."""

    async def close(self) -> None:
        """End what was started."""


class LocalCells:
    """Child processes, each with a sandbox."""

    def __init__(self, sandbox: str, num_cells: int) -> None:
        """`sandbox` is one that was found to work here."""
        # Made by the first child, and removed with what those that were killed have left in it.
        self._folder = Path(tempfile.gettempdir()) / f"penstock-code-{secrets.token_hex(8)}"
        command = ("services.reward.code.cell", sandbox, str(self._folder))
        self._children = Children([Child(*command, max_line_bytes=MAX_LINE_BYTES) for _ in range(num_cells)])

    async def run(self, job: Job, *, deadline_s: float) -> Verdict:
        """How a program did."""
        job = replace(job, limits=replace(job.limits, life_s=job.limits.wall_s + _OUTLIVES_S))
        try:
            async with self._children.lent(deadline_s=deadline_s) as cell:
                found = await cell.ask(job.to_json(), timeout_s=longest_s(job), deadline_s=deadline_s)
        except ChildEndedError as error:
            raise SandboxError(f"the process that runs programs: {error}") from error
        return Verdict(**found)

    async def check(self) -> str:
        """Nothing that was not said before."""
        return ""

    async def probe(self) -> None:
        """Nothing has to answer."""

    async def close(self) -> None:
        """End the child processes."""
        await self._children.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def longest_s(job: Job) -> float:
    """Most seconds that a program's tests may take."""
    suite = job.suite
    num_starts = suite.num_tests if isinstance(suite, Streams) else 1
    # One may have been kept in vain before another starts.
    tests_start_s = 2 * START_TIMEOUT_S if isinstance(suite, Assertions) else 0.0
    return num_starts * job.limits.wall_s + tests_start_s + SLACK_S
