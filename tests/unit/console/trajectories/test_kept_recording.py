"""`penstock export` of a run that has ended: from its folder, without a broker."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from console.recording.reader import read_samples
from console.recording.writer import open_writer
from tests.helpers.brokers.recordings import recorded
from tests.helpers.console import document, penstock_in_process


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of an ended run."""
    value = document(tmp_path)
    value["run"]["id"] = "run-1"
    made = tmp_path / "runs" / "run-1"
    made.mkdir(parents=True)
    (made / "config.yaml").write_text(yaml.safe_dump(value))
    return made


def write_recording(path: Path) -> None:
    writer = open_writer(path)
    for version in (1, 2, 3):
        writer.write([recorded(f"g{version}", version=version)])
        writer.end_step()
    writer.close()


def versions(path: Path) -> list[int]:
    return [sample.policy_version for sample in read_samples(path)]


def test_an_ended_run_is_exported_from_its_recording(run: Path, tmp_path: Path) -> None:
    write_recording(run / "trajectories.jsonl")
    result = penstock_in_process("export", "run-1", "--out", "all.parquet", cwd=tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"all.parquet: 3 samples, steps 1 to 3 of run-1, from {run / 'trajectories.jsonl'}" in result.stdout
    assert versions(tmp_path / "all.parquet") == [1, 2, 3]
    later = penstock_in_process("export", "run-1", "--out", "later.jsonl", "--from-version", "2", cwd=tmp_path)
    assert later.exit_code == 0, later.output
    assert versions(tmp_path / "later.jsonl") == [2, 3]


def test_without_a_recording_the_few_kept_samples_are_exported_and_a_note_says_so(run: Path, tmp_path: Path) -> None:
    write_recording(run / "samples.jsonl")
    result = penstock_in_process("export", "run-1", "--out", "few.jsonl", cwd=tmp_path)
    assert result.exit_code == 0, result.output
    assert "a few groups of each step are all that is kept without record=true" in result.stderr
    assert versions(tmp_path / "few.jsonl") == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--follow",), "not under way here; name its broker with --broker, or leave --follow out"),
        (("--from-version", "9"), "--from-version 9: "),
        (("--out", "runs/run-1/trajectories.jsonl"), "is the run's own recording; name another file"),
    ],
)
def test_what_a_folder_cannot_give_is_refused(run: Path, tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    write_recording(run / "trajectories.jsonl")
    result = penstock_in_process("export", "run-1", "--out", "new.jsonl", *options, cwd=tmp_path)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert versions(run / "trajectories.jsonl") == [1, 2, 3]
    assert not (tmp_path / "new.jsonl").exists()


def test_a_folder_without_any_recording_names_what_to_do(run: Path, tmp_path: Path) -> None:
    result = penstock_in_process("export", str(run), "--out", "new.jsonl", cwd=tmp_path)
    assert result.exit_code == 2
    assert "name its broker with --broker, or start runs with record=true" in result.stderr
