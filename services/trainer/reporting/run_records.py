"""Holds what a trainer records of its run, step by step: lines of metrics and evaluations, and log-prob gaps.

Invariant: after `cut_after` no file has a step of an abandoned history.
"""

from __future__ import annotations

from pathlib import Path

from services.trainer.config import TrainingConfig
from services.trainer.reporting.logprob_gaps import NAME as GAPS
from services.trainer.reporting.logprob_gaps import GapFile
from services.trainer.reporting.metrics import JsonLines
from services.trainer.reporting.trackers import open_trackers

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"


class RunRecords:
    """The files in a run's folder, and the trackers that get the same numbers."""

    def __init__(self, run_dir: Path, config: TrainingConfig) -> None:
        self._run_dir, self._config = run_dir, config
        self.metrics = JsonLines(run_dir / METRICS)
        self.evaluations = JsonLines(run_dir / EVALUATIONS, prefix="eval/")
        self.gaps = GapFile(run_dir, groups_per_step=config.gap_groups_per_step, max_bytes=config.max_gap_bytes)

    def open_trackers(self, *, run_id: str, policy_version: int, allows_plain: bool) -> None:
        """Start the configured trackers, and send lines to them; raises ConfigError."""
        self.metrics.trackers = self.evaluations.trackers = open_trackers(
            self._config.run.trackers,
            self._run_dir,
            run_id=run_id,
            policy_version=policy_version,
            document=self._config.model_dump(mode="json"),
            allows_plain=allows_plain,
        )

    def cut_after(self, policy_version: int) -> None:
        """Remove what a resumed run had recorded of later steps."""
        for lines in (self.metrics, self.evaluations, self.gaps):
            lines.cut_after(policy_version)

    def delete(self) -> None:
        """Delete all files, for a run that went on elsewhere."""
        for name in (METRICS, EVALUATIONS, GAPS):
            (self._run_dir / name).unlink(missing_ok=True)

    def flush(self) -> None:
        """Put every line of metrics and evaluations on disk."""
        self.metrics.flush()
        self.evaluations.flush()

    def close(self) -> None:
        """Write what is outstanding."""
        self.gaps.close()
        self.metrics.trackers.close()
