"""Samples of a recording: listed, searched, sorted and shown one by one, however the file looks."""

from __future__ import annotations

import itertools
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from console.page.files.group_index import GroupHead, GroupIndex, Place
from console.page.files.indexed_recording import open_recording
from console.page.files.values import BadQuestionError
from console.page.queries.sample_lists import SampleLists
from console.page.run_data import RunData
from console.recording.parts import parts_of
from console.recording.recorded_sample import Recorded
from tests.helpers.brokers.recordings import recorded
from tests.helpers.page.run_folders import BEGIN_S, page_folder, write_recording

HOSTILE = "<script>alert(1)</script>\x00\x1b[31m\u202e"


def steps_of_two(num_steps: int = 3) -> list[Recorded]:
    """Two groups of two a step; the prompt of `a` is the same in every step, and is answered better and better."""
    samples = []
    for version, name, index in itertools.product(range(1, num_steps + 1), "ab", range(2)):
        value = version / 10 if name == "a" else index / 2
        sample = recorded(f"{name}{version}", index, version=version, value=value)
        if name == "b":
            sample.prompt.messages[0].content = f"b {version}"
        samples.append(sample)
    return samples


def keys(answer: dict[str, Any]) -> list[str]:
    return [each["key"] for each in answer["samples"]]


@pytest.mark.parametrize("name", ["trajectories.jsonl", "trajectories.parquet", "samples.jsonl"])
def test_a_step_is_listed_sorted_searched_and_paged(tmp_path: Path, name: str) -> None:
    folder = page_folder(tmp_path / "r")
    write_recording(folder.path / name, steps_of_two())
    data = RunData(folder)
    newest = data.answer("samples", {})
    assert (newest["step"], newest["steps_with_samples"], newest["total"]) == (3, [1, 3], 4)
    assert keys(newest) == ["a3/0", "a3/1", "b3/0", "b3/1"]
    first = newest["samples"][0]
    assert (first["score"], first["status"], first["tokens"], first["staleness"]) == (0.3, "ok", 3, 2)
    assert first["components"] == {"a": 0.1, "b": 1.0}
    assert keys(data.answer("samples", {"sort": "best"}))[0] == "b3/1"
    assert keys(data.answer("samples", {"sort": "worst", "step": "1", "limit": "1"})) == ["b1/0"]
    assert keys(data.answer("samples", {"search": "B 3"})) == ["b3/0", "b3/1"]
    assert keys(data.answer("samples", {"offset": "3"})) == ["b3/1"]
    changed = data.answer("samples", {"sort": "changed"})["samples"]
    assert (changed[0]["key"], changed[0]["change"]) == ("a3/0", pytest.approx(0.1))
    assert changed[-1]["change"] is None
    assert data.answer("samples", {"step": "9"})["samples"] == []


def test_one_sample_is_shown_with_tokens_turns_times_and_its_prompts_other_answers(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    model = folder.checkpoints / "step_3"
    model.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({"five ": 5, "six ": 6, "seven": 7, **{f"_{n}": n for n in range(5)}}, "_0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    write_recording(folder.path / "trajectories.jsonl", steps_of_two())
    found = RunData(folder).answer("sample", {"step": "2", "key": "a2/1"})
    assert found["prompt"] == [{"role": "user", "content": 'say "2"'}]
    tokens = found["tokens"]
    assert [each["text"] for each in tokens] == ["five ", "six ", "seven"]
    assert [each["mask"] for each in tokens] == [1, 0, 1]
    assert [(each["version"], each["staleness"]) for each in tokens] == [(0, 1), (0, 1), (1, 0)]
    assert tokens[0]["logprob"] == pytest.approx(-0.1)
    assert tokens[0]["trainer_logprob"] is None
    assert [(each["role"], each["text"]) for each in found["turns"]] == [
        ("assistant", "five "),
        ("environment", "six "),
        ("assistant", "seven"),
    ]
    assert found["times"]["trained_s"] == BEGIN_S + 20
    assert found["group_advantage"] == 0.0
    assert found["same_prompt"] == [
        {"step": 1, "key": "a1/0", "version": 1},
        {"step": 3, "key": "a3/0", "version": 1},
    ]
    assert RunData(folder).answer("sample", {"key": "a2/1"}) == found
    with pytest.raises(BadQuestionError, match="key"):
        RunData(folder).answer("sample", {"step": "2", "key": "a3/1"})


def test_recordings_that_are_torn_damaged_rewound_split_or_grow_are_borne(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    path = folder.path / "trajectories.jsonl"
    write_recording(path, steps_of_two(), max_bytes=2000)
    parts = parts_of(path)
    assert len(parts) > 1
    data = RunData(folder)
    assert data.answer("samples", {})["steps_with_samples"] == [1, 3]
    last = parts[-1]
    row = json.loads(last.read_bytes().splitlines()[-1])
    odd = {**row, "policy_version": 4, "completion": HOSTILE, "score": None, "token_ids": "x", "versions": [1]}
    with last.open("ab") as file:
        file.write(b'{"run_id": 3\n[]\n\xff\n' + json.dumps(odd).encode() + b"\n" + json.dumps(row).encode()[:50])
    (sample,) = data.answer("samples", {})["samples"]
    assert (sample["step"], sample["score"], sample["tokens"], sample["completion"]) == (4, None, 0, HOSTILE)
    assert data.answer("sample", {"step": "4", "key": sample["key"]})["tokens"] == []
    # The trainer went back to version 1: steps 2 to 4 of the first history are void.
    with last.open("ab") as file:
        file.write(b"\n" + json.dumps({**row, "policy_version": 2, "history": 1, "group_id": "new"}).encode() + b"\n")
    assert keys(data.answer("samples", {})) == ["new/1"]
    assert data.answer("samples", {})["steps"] == [1, 2]
    for part in parts:
        part.unlink()
    write_recording(path, [recorded("other")])
    assert keys(data.answer("samples", {})) == ["other/0"]


def test_a_file_cut_at_any_byte_gives_whole_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    write_recording(path, [recorded("a"), recorded("b", version=2)])
    content = path.read_bytes()
    for end in range(0, len(content), 97):
        path.write_bytes(content[:end])
        recording = open_recording(path)
        recording.advance()
        assert len(recording.index) == content[:end].count(b"\n")


def test_an_index_is_built_in_pieces_and_forgets_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    write_recording(path, steps_of_two(50))
    recording = open_recording(path)
    shares: list[float] = []
    while not shares or shares[-1] < 1.0:
        recording.advance(budget_s=1e-4)
        shares.append(recording.indexed_share)
    assert len(shares) > 1
    assert recording.index.steps() == list(range(1, 51))
    index = GroupIndex(max_groups=4)
    for version in range(1, 7):
        head = GroupHead(policy_version=version, history=0, group_id=b"g%d" % version, prompt=b"p")
        index.add(head, Place(part=1, begin=version, end=version + 1))
    assert (index.steps(), index.num_forgotten) == ([3, 4, 5, 6], 2)


def test_one_step_is_listed_while_the_recording_is_read_and_the_newest_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    write_recording(path, steps_of_two(50), max_bytes=20_000)
    assert len(parts_of(path)) > 1
    recording = open_recording(path)
    lists = SampleLists(recording)
    recording.advance = partial(recording.advance, budget_s=1e-4)  # type: ignore[method-assign]
    answers = [lists.answer({})]
    while answers[-1]["indexed"] < 1:
        answers.append(lists.answer({}))
    shares = [each["indexed"] for each in answers]
    assert shares == sorted(shares)
    assert len(shares) > 2
    while_reading = {each["step"] for each in answers[:-1] if each["steps_with_samples"]}
    assert len(while_reading) == 1
    assert answers[-1]["step"] == 50
    with parts_of(path)[-1].open("ab") as last:
        last.write(b'{"run_id": "torn')
    torn = lists.answer({})
    while torn["indexed"] < 1:
        torn = lists.answer({})
    assert torn["step"] == 50


def test_a_line_without_an_end_to_its_prompt_takes_no_time(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    head = b'{"run_id":"r","policy_version":1,"history":0,"group_id":"g",'
    path.write_bytes(head + b',"prompt":"","messages":' * 200_000 + b"\n")
    begin_s = time.process_time()
    open_recording(path).advance()
    assert time.process_time() - begin_s < 2.0
