"""Finds what a run's folder holds of its recording, and copies it: what is left of a run without a broker."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from console.config.config import RunConfig
from console.config.run_folder import RunFolder
from console.recording.parts import parts_of
from console.recording.reader import read_samples
from console.recording.step_recorder import Recording
from console.recording.writer import open_writer
from console.run.run_recorder import KEPT_SAMPLES, TRAJECTORIES
from penstock.config import ConfigError


def kept_recording(folder: RunFolder, config: RunConfig) -> Path:
    """The run's recording, or the few samples of each step that are kept without one. Raises ConfigError."""
    whole = config.record if isinstance(config.record, Path) else folder.path / TRAJECTORIES
    found = next((path for path in (whole, folder.path / KEPT_SAMPLES) if parts_of(path)), None)
    if found is None:
        raise ConfigError(
            f"{config.run.id}: not under way here, and its folder holds no recording; name its broker with --broker, "
            "or start runs with record=true"
        )
    return found


def is_whole(path: Path) -> bool:
    """Whether a kept recording holds every sample."""
    return path.name != KEPT_SAMPLES


def copy_recording(source: Path, out: Path, *, run_id: str, from_version: int) -> Recording:
    """Write a run's surviving samples from a version on into another file. Raises ConfigError."""
    if out.absolute() == source.absolute():
        raise ConfigError(f"--out: {out}: is the run's own recording; name another file")
    recording = Recording()
    writer = open_writer(out)
    try:
        for (_, version, _), samples in groupby(read_samples(source), key=lambda sample: sample.step):
            wanted = [sample for sample in samples if sample.run_id == run_id and version >= from_version]
            if wanted:
                writer.write(wanted)
                writer.end_step()
                recording.first_version = recording.first_version or version
                recording.last_version = version
                recording.num_samples += len(wanted)
    except BaseException:
        writer.discard()
        raise
    (writer.close if recording.num_samples else writer.discard)()
    return recording
