"""A resume whose rows changed since the newest checkpoint is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

from console.config.config import RunConfig
from console.config.run_folder import RunFolder
from console.run.preflight import _changed_rows
from services.trainer.checkpoints.checkpoint import COMPLETE_MARKER, FORMAT_VERSION, STATE_FILE
from services.trainer.data.row_digests import ORDER_KEY, rows_digest
from tests.helpers.console import document


def write_checkpoint(root: Path, step: int, digest: str | None) -> None:
    state = root / f"step_{step}" / STATE_FILE
    state.parent.mkdir(parents=True)
    order = json.dumps({"sources": {"": {} if digest is None else {"digest": digest}}})
    state.write_text(json.dumps({"format": FORMAT_VERSION, "num_steps": step, "extra": {ORDER_KEY: order}}))
    (root / f"step_{step}" / COMPLETE_MARKER).write_text(json.dumps({"files": {}}))


def test_the_newest_checkpoint_says_with_which_rows_the_run_began(tmp_path: Path) -> None:
    config = RunConfig.model_validate(document(tmp_path))
    folder, rows = RunFolder(tmp_path / "runs" / "r1"), tmp_path / "train.jsonl"
    assert _changed_rows(config, folder) == []
    # Of an earlier version, which kept no digest.
    write_checkpoint(folder.checkpoints, 1, None)
    assert _changed_rows(config, folder) == []
    write_checkpoint(folder.checkpoints, 2, rows_digest(rows))
    assert _changed_rows(config, folder) == []
    rows.write_text(rows.read_text().replace("1+1", "1+3"))
    (problem,) = _changed_rows(config, folder)
    assert problem.startswith(f"data.train: {rows} had other rows (sha256 ")
    assert "put the former file back to resume" in problem
    assert "\n" not in problem
