"""Writes a broker's export to a file, each step as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from console.recording.reader import scan
from console.recording.recorded_sample import RecordingError, samples_of
from console.recording.writer import RecordingWriter
from penstock.clients.export import StepExport
from penstock.process.tasks import uninterrupted


@dataclass(slots=True, kw_only=True)
class Recording:
    """Progress of a recording."""

    num_samples: int = 0
    """Samples, including those of void steps."""
    first_version: int | None = None
    """Policy version of the first step."""
    last_version: int | None = None
    """Policy version of the newest step."""
    missing: dict[int, int] = field(default_factory=dict)
    """Samples that the broker's Redis lost, by the policy version of their step."""
    is_in_step: bool = False
    """Whether a step is only partly written."""


async def record(
    export: StepExport,
    writer: RecordingWriter,
    *,
    run_id: str,
    recording: Recording,
    on_step: Callable[[Recording], None] = lambda recording: None,
) -> None:
    """Write the export until it ends; raises its errors. The writer stays open, and `recording` is updated.

    Files are written in a thread, so that the event loop is not blocked; a cancelled caller waits for it, so that no
    file is closed meanwhile.
    """
    async for response in export.responses():
        if not response.HasField("group"):
            await uninterrupted(asyncio.to_thread(writer.end_step))
            recording.is_in_step = False
            if response.num_missing_samples:
                recording.missing[response.policy_version] = response.num_missing_samples
            on_step(recording)
            continue
        samples = samples_of(run_id, response)
        recording.is_in_step = True
        await uninterrupted(asyncio.to_thread(writer.write, samples))
        recording.num_samples += len(samples)
        recording.last_version = response.policy_version
        if recording.first_version is None:
            recording.first_version = response.policy_version


def resume_point(path: Path, run_id: str) -> tuple[int, int | None]:
    """Version and history from which a followed recording continues: its last step, which may be torn, is sent again.

    (0, None) if there is no recording yet. Raises RecordingError if it is another run's.
    """
    if not path.exists():
        return 0, None
    runs = scan(path)
    if not runs:
        return 0, None
    if set(runs) != {run_id}:
        raise RecordingError(f"{path}: holds run {', '.join(sorted(runs))}; record {run_id} to another file")
    return runs[run_id].last_version, runs[run_id].last_history


def missing_line(version: int, num_samples: int) -> str:
    """Message about samples that cannot be recorded."""
    return f"step {version}: {num_samples} samples are missing, Redis lost them"
