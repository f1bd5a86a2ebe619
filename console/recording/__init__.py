"""Records a run's trained trajectories: one row per sample, as JSONL or parquet, written and read as a stream."""

from console.recording.reader import RecordedGroup, read_groups, read_samples, scan
from console.recording.recorded_sample import Recorded, RecordingError, samples_of
from console.recording.writer import RecordingWriter, open_writer

__all__ = [
    "Recorded",
    "RecordedGroup",
    "RecordingError",
    "RecordingWriter",
    "open_writer",
    "read_groups",
    "read_samples",
    "samples_of",
    "scan",
]
