"""The lines that a run writes as it goes, to metrics.jsonl (steps), evaluations.jsonl and its trackers."""

from __future__ import annotations

from pathlib import Path

from services.trainer.config import TrainingConfig
from services.trainer.reporting.metrics import JsonLines
from services.trainer.reporting.trackers import TrackedLines, Trackers, open_trackers


class RunLines:
    """Those of the run in `run_dir`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.metrics = JsonLines(run_dir / "metrics.jsonl")
        self.evaluations = JsonLines(run_dir / "evaluations.jsonl")
        self._trackers = Trackers({})

    def cut_after(self, policy_version: int) -> None:
        """Keep only lines of `policy_version` and before."""
        self.metrics.cut_after(policy_version)
        self.evaluations.cut_after(policy_version)

    def open_trackers(self, config: TrainingConfig, *, run_id: str, policy_version: int, allows_plain: bool) -> None:
        """Begin the trackers that the configuration asks for, and let lines go there, too; raises ConfigError."""
        self._trackers = open_trackers(
            config.run.trackers,
            self._run_dir,
            run_id=run_id,
            policy_version=policy_version,
            document=config.model_dump(mode="json"),
            allows_plain=allows_plain,
        )
        self.metrics = TrackedLines(self._run_dir / "metrics.jsonl", self._trackers)
        self.evaluations = TrackedLines(self._run_dir / "evaluations.jsonl", self._trackers, prefix="eval/")

    def flush(self) -> None:
        """Write what the disk refused before; raises OSError when it refuses still."""
        self.metrics.flush()
        self.evaluations.flush()

    def close(self) -> None:
        """End the trackers."""
        self._trackers.close()
