"""Records every trained step of a run into its folder, for `penstock run` with `record`; or a few groups of each.

A recorder that cannot continue reports it and ends; the run continues without it. Only a disk that refuses the
recording ends the run too, which can then be resumed. Steps discarded before they were recorded are reported as a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

from console.recording.recorded_sample import RecordingError
from console.recording.step_recorder import Recording, missing_line, record, resume_point
from console.recording.thinned_writer import ThinnedWriter
from console.recording.writer import RecordingWriter, open_writer
from penstock.clients.export import StepExport
from penstock.errors import NotRetainedError, PenstockError
from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.security import Security

FINISH_S = 15.0
"""Time to fetch the last step when the run ends."""
KEPT_FINISH_S = 3.0
"""The same where only a few samples are kept."""
SETTLE_S = 5.0
"""Time to open the file, and to finish a step being recorded: if interrupted, it is recorded twice."""
TRAJECTORIES, KEPT_SAMPLES = "trajectories.jsonl", "samples.jsonl"


class RunRecorder:
    """One run's recorder.

    Args:
        run_id: Which run.
        broker: Its broker.
        path: The recording; an existing one is continued.
        security: For the connection.
        note: Called with messages for the user.
        on_refusal: Called when the disk refused a write.
        max_bytes: Size at which the recording continues in another file; None means one file.
        groups_per_step: 0 records all samples. Otherwise this many groups of each step are kept, in a file of
            `max_bytes` that is thinned when it is full (`console.recording.thinned_writer`); this recording is
            optional, and only its failures are reported to the user.
    """

    def __init__(
        self,
        *,
        run_id: str,
        broker: str,
        path: Path,
        security: Security,
        note: Callable[[str], None],
        on_refusal: Callable[[OSError, Path], None] = lambda error, path: None,
        max_bytes: int | None = None,
        groups_per_step: int = 0,
    ) -> None:
        self._groups_per_step = groups_per_step
        self._what = "samples for the page" if groups_per_step else "recording"
        self._run_id, self._broker, self._path = run_id, broker, path
        self._security, self._note, self._on_refusal = security, note, on_refusal
        self._max_bytes = max_bytes
        self._recording = Recording()
        self._problems: list[str] = []
        self._noted_missing: set[int] = set()
        """Steps whose missing samples were reported."""
        self._writer: RecordingWriter | None = None
        self._next: tuple[int, int | None] = (0, None)
        self._has_noted_outage = False
        self._is_over = False
        """Whether the recording has ended: the run was closed, or recording stopped."""
        self._task: asyncio.Task[None] | None = None
        self._has_settled = asyncio.Event()
        """Set when the file is open, and after each step."""

    def start(self) -> None:
        """Start; waits for the run to be opened."""
        self._task = asyncio.create_task(self._run())

    async def finish(self) -> None:
        """Fetch the missing steps, if the broker answers in time, and complete the file."""
        if self._task is None:
            return
        if self._writer is None or self._recording.is_in_step:
            self._has_settled.clear()
            settled = asyncio.create_task(self._has_settled.wait())
            await asyncio.wait({self._task, settled}, timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
        await end(self._task)
        if self._writer is None:
            return
        if not self._is_over:
            try:
                async with asyncio.timeout(KEPT_FINISH_S if self._groups_per_step else FINISH_S):
                    await self._export(self._writer, follow=False)
            except (PenstockError, RecordingError, OSError) as error:
                self._problem(f"the last steps could not be fetched: {str(error) or 'no answer in time'}")
        try:
            self._writer.close()
        except OSError as error:
            self._problem(f"it could not be completed: {error}")

    def closing_lines(self) -> Iterator[str]:
        """Closing message for the user."""
        if self._recording.num_samples and not self._groups_per_step:
            steps = f"steps {self._recording.first_version} to {self._recording.last_version}"
            yield f"recording: {self._path} ({self._recording.num_samples} samples, {steps})"
        for problem in self._problems:
            yield f"{self._what}: {problem}"

    async def _run(self) -> None:
        try:
            self._next = await asyncio.to_thread(resume_point, self._path, self._run_id)
            self._writer = await asyncio.to_thread(self._open)
            self._has_settled.set()
            while True:
                try:
                    await self._export(self._writer, follow=True)
                    self._is_over = True
                    return
                except NotRetainedError as error:
                    oldest = int(error.metadata["oldest_policy_version"])
                    self._problem(
                        f"a gap: steps {self._next[0]} to {oldest - 1} were forgotten before they were recorded whole"
                    )
                    self._next = (oldest, self._next[1])
        except (PenstockError, RecordingError, OSError) as error:
            self._is_over = True
            self._problem(f"it stopped: {error}")
            if isinstance(error, OSError):
                self._on_refusal(error, self._path)

    def _open(self) -> RecordingWriter:
        if self._groups_per_step and self._max_bytes is not None:
            return ThinnedWriter(self._path, max_bytes=self._max_bytes)
        return open_writer(self._path, is_followed=True, max_bytes=self._max_bytes)

    async def _export(self, writer: RecordingWriter, *, follow: bool) -> None:
        version, history = self._next
        async with Connection(self._broker, security=self._security) as broker:
            export = StepExport(
                broker,
                run_id=self._run_id,
                follow=follow,
                next_version=version,
                history=history,
                waits_for_run=follow,
                max_groups_per_step=self._groups_per_step,
            )
            export.outage.on_notice = self._note_outage
            try:
                recording = self._recording
                await record(export, writer, run_id=self._run_id, recording=recording, on_step=self._on_step)
            finally:
                self._next = (export.next_version, export.history)

    def _on_step(self, recording: Recording) -> None:
        self._has_settled.set()
        for version in recording.missing.keys() - self._noted_missing:
            self._noted_missing.add(version)
            self._problem(missing_line(version, recording.missing[version]))

    def _note_outage(self, text: str) -> None:
        if text and not self._has_noted_outage:
            self._note(f"{self._what}: {text}")
        self._has_noted_outage = bool(text)

    def _problem(self, text: str) -> None:
        self._problems.append(text)
        self._note(f"{self._what}: {text}")
