"""Recordings: what goes in comes out, bit for bit; abandoned steps and repetitions are left out; bad rows are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.recording.parts import parts_of
from console.recording.reader import read_groups, read_part, read_samples, scan
from console.recording.recorded_sample import Recorded, RecordingError
from console.recording.row_codec import shortest_decimals
from console.recording.writer import open_writer
from penstock.v1 import types_pb2
from penstock.wire.codec import encode_versions, join_versions
from tests.helpers.brokers.recordings import recorded

SUFFIXES = (".jsonl", ".parquet")
_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def write(path: Path, *samples: Recorded, is_followed: bool = False) -> Path:
    """A recording of the samples, a step at a time."""
    writer = open_writer(path, is_followed=is_followed)
    for sample in samples:
        writer.write([sample])
        writer.end_step()
    writer.close()
    return path


def names(path: Path) -> list[tuple[int, str, int]]:
    """Step, group and index of what survives, in order."""
    return [(sample.policy_version, *sample.position) for sample in read_samples(path)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_field_comes_back(tmp_path: Path, suffix: str) -> None:
    bare = recorded("g2")
    nothing = types_pb2.VersionRuns()
    parts = {"key": bare.trajectory.key, "score": bare.trajectory.score, "policy_versions": nothing}
    bare.trajectory.CopyFrom(types_pb2.Trajectory(**parts))
    bare.trajectory.score.ClearField("latency")
    bare.prompt.sampling.CopyFrom(types_pb2.SamplingParams(max_new_tokens=1))
    abstained = types_pb2.Score(status=types_pb2.SCORE_STATUS_ABSTAINED, message="why", model="n")
    samples = [recorded(), recorded(index=1).rescored(abstained), bare]
    assert list(read_samples(write(tmp_path / f"file{suffix}", *samples))) == samples


@settings(max_examples=60, deadline=None)
@given(values=st.lists(_FLOATS, min_size=1, max_size=50))
def test_short_decimals_are_the_same_float32(values: list[float]) -> None:
    exact = np.array(values, np.float32)
    read_back = np.array(json.loads(json.dumps(shortest_decimals(exact))), np.float64).astype(np.float32)
    assert read_back.tobytes() == exact.tobytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_versions_that_came_in_chunks_are_written_as_few_runs(tmp_path: Path, suffix: str) -> None:
    sample = recorded()
    sample.trajectory.policy_versions.CopyFrom(join_versions([encode_versions([0]), encode_versions([0, 1])]))
    (read,) = read_samples(write(tmp_path / f"file{suffix}", sample))
    assert read.trajectory.policy_versions == encode_versions([0, 0, 1])


def test_log_probs_are_short_in_json(tmp_path: Path) -> None:
    row = json.loads(write(tmp_path / "a.jsonl", recorded()).read_text())
    assert row["logprobs"] == [-0.1, -1e-30, -12.345678]
    assert (row["sampling"]["temperature"], row["score"]["status"], row["finish_reason"]) == (0.7, "ok", "stop")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_steps_that_a_rewind_made_void_are_left_out(tmp_path: Path, suffix: str) -> None:
    # Versions 1 to 4; back to 1; version 2 anew, and then the end: 3 and 4 of the first history never happened.
    first = [recorded(f"g{version}", version=version) for version in (1, 2, 3, 4)]
    path = write(tmp_path / f"file{suffix}", *first, recorded("g3", version=2, history=1))
    assert names(path) == [(1, "g1", 0), (2, "g3", 0)]
    index = scan(path)["run-1"]
    assert (index.last_version, index.last_history) == (2, 1)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_recording_is_gone_on_with_and_repeated_samples_count_once(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    write(path, recorded("a"), recorded("b", version=2), is_followed=True)
    write(path, recorded("b", version=2), recorded("c", version=2), recorded("d", version=3), is_followed=True)
    assert names(path) == [(1, "a", 0), (2, "b", 0), (2, "c", 0), (3, "d", 0)]
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_groups_stand_together_in_order(tmp_path: Path) -> None:
    samples = [recorded("b"), recorded("b", 1), recorded("a"), recorded("a", version=2)]
    groups = list(read_groups(write(tmp_path / "a.jsonl", *samples)))
    assert [(item.policy_version, item.group.prompt.group_id, len(item.group.trajectories)) for item in groups] == [
        (1, "b", 2),
        (1, "a", 1),
        (2, "a", 1),
    ]
    assert groups[0].group.trajectories[1] == samples[1].trajectory


def test_a_line_torn_by_a_crash_is_left_out_and_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", recorded("a"), recorded("b"), is_followed=True)
    path.write_bytes(path.read_bytes()[:-5])
    assert names(path) == [(1, "a", 0)]
    write(path, recorded("b"), is_followed=True)
    assert names(path) == [(1, "a", 0), (1, "b", 0)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_written_in_one_go_appears_whole_or_not_at_all(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    writer = open_writer(path)
    writer.write([recorded()])
    assert not path.exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []
    write(path, recorded())
    with pytest.raises(RecordingError, match="exists already"):
        open_writer(path)


def test_a_followed_file_holds_each_step_as_soon_as_it_is_over(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "a.jsonl", is_followed=True)
    writer.write([recorded()])
    writer.end_step()
    assert names(writer.path) == [(1, "g1", 0)]
    writer.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": [-0.5]}, "logprobs: 1 numbers for 3 token_ids"),
        ({"token_ids": [1, 2, 2**31]}, "token_ids: a number does not fit int32"),
        ({"token_ids": [1.5, 2, 3]}, "token_ids: expected a list of int32"),
        ({"versions": [0], "version_lengths": [2]}, "versions: run lengths add up to 2"),
        ({"finish_reason": "tired"}, "TIRED"),
        ({"policy_version": 0}, "policy_version: expected a whole number of at least 1"),
        ({"group_id": 5}, "group_id: expected text"),
        ({"prompt_token_ids": []}, "prompt_token_ids: must not be empty"),
        ({"score": None}, "score: expected an object"),
        ({"group_size": None}, "group_size: expected a whole number"),
    ],
)
def test_a_damaged_row_is_reported_with_its_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "a.jsonl", recorded())
    path.write_text(json.dumps(json.loads(path.read_text()) | change) + "\n")
    with pytest.raises(RecordingError, match=r"a\.jsonl, line 1: ") as told:
        list(read_samples(path))
    assert words in str(told.value)


def test_a_missing_column_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", recorded())
    row = json.loads(path.read_text())
    del row["token_ids"]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(RecordingError, match="column 'token_ids' is missing"):
        list(read_samples(path))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_what_is_no_recording_is_reported(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(RecordingError, match=name):
        list(read_samples(path))
    path.write_text("no recording\n")
    with pytest.raises(RecordingError, match=name):
        list(read_samples(path))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_followed_recording_is_split_by_size_and_read_as_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    for first in (1, 4):
        writer = open_writer(path, is_followed=True, max_bytes=1)
        for version in range(first, first + 3):
            # The last step of the recording comes again when it is gone on with.
            writer.write([recorded("a", version=version - (version == first == 4))])
            writer.write([recorded("b", version=version)])
            writer.end_step()
        writer.close()
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted(
        [path.name, *(f"run-{number:05d}{suffix}" for number in range(2, 7))]
    )
    assert names(path) == [
        (version, group, 0) for version in range(1, 7) for group in "ab" if (version, group) != (4, "a")
    ]
    assert [item.policy_version for item in read_groups(path)] == [1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6]
    assert scan(path)["run-1"].last_version == 6
    # A step is in one file, and each row is there once.
    assert [len(list(read_part(part))) for part in parts_of(path)] == [2, 2, 2, 1, 2, 2]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_step_that_comes_again_is_in_the_file_once(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    write(path, recorded("a"), recorded("b", version=2), is_followed=True)
    writer = open_writer(path, is_followed=True)
    for _ in range(2):
        # A stream that was lost within the step begins with it again.
        writer.write([recorded("b", version=2)])
        writer.write([recorded("c", version=2)])
    writer.close()
    assert [row["group_id"] for _where, row in read_part(path)] == ["a", "b", "c"]


def test_parts_of_another_recording_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    (tmp_path / "run-00002.jsonl").write_text("")
    with pytest.raises(RecordingError, match=r"run-00002\.jsonl: is left of another recording"):
        open_writer(tmp_path / "run.jsonl", is_followed=True)
