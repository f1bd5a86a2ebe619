"""Data rows: aliases, chat, parquet, and one clear line for each thing that is wrong."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from services.trainer.data.prompt_rows import DataError, Message, read_rows


def write(path, *records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("prompt_key", ["prompt", "question", "problem"])
@pytest.mark.parametrize("answer_key", ["answer", "label", "ground_truth", "solution"])
def test_every_alias_is_understood(tmp_path, prompt_key, answer_key):
    (row,) = read_rows(write(tmp_path / "d.jsonl", {prompt_key: "1+1=", answer_key: 2, "level": 3}))
    assert (row.prompt, row.answer, json.loads(row.metadata_json)) == ("1+1=", "2", {"level": 3})


def test_the_first_alias_wins_and_the_others_become_metadata(tmp_path):
    (row,) = read_rows(write(tmp_path / "d.jsonl", {"question": "q", "answer": "4", "solution": "2+2 is 4"}))
    assert row.answer == "4"
    assert json.loads(row.metadata_json) == {"solution": "2+2 is 4"}


def test_chat_messages_are_kept_turn_by_turn(tmp_path):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    (row,) = read_rows(write(tmp_path / "d.jsonl", {"prompt": turns, "answer": "2"}))
    assert row.prompt == (Message(role="system", content="be brief"), Message(role="user", content="1+1?"))


def test_parquet_rows_read_like_jsonl_rows(tmp_path):
    path = tmp_path / "d.parquet"
    table = pyarrow.table({"question": ["a", "b"], "answer": ["1", "2"], "level": [1, 2]})
    pyarrow.parquet.write_table(table, path)
    assert [(row.prompt, row.answer) for row in read_rows(path)] == [("a", "1"), ("b", "2")]
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a", "b"], "answer": ["1", None]}), path)
    assert [row.answer for row in read_rows(path)] == ["1", ""]
    with pytest.raises(
        DataError, match="row 2: no answer, which the reward math needs; give one of the columns answer"
    ):
        read_rows(path, needs_answer="math")


def test_blank_lines_do_not_shift_line_numbers(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "answer": "1"}, "", {"label": "b"})
    with pytest.raises(DataError, match="line 3: no prompt"):
        read_rows(path)


@pytest.mark.parametrize("answer", [{}, {"answer": None}, {"answer": ""}, {"answer": " ", "tests": []}])
def test_only_a_reward_that_compares_needs_answers(tmp_path, answer):
    path = write(tmp_path / "d.jsonl", {"prompt": "a", **answer})
    assert [row.answer for row in read_rows(path)] == [""]
    with pytest.raises(DataError, match="line 1: no answer, which the reward exact_match needs"):
        read_rows(path, needs_answer="exact_match")


def test_an_empty_answer_gives_way_to_another_column(tmp_path):
    assert read_rows(write(tmp_path / "d.jsonl", {"prompt": "a", "answer": "", "solution": 0}))[0].answer == "0"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ("[1]", "must be an object"),
        ({"answer": "1"}, "no prompt"),
        ({"prompt": " ", "answer": "1"}, "prompt: empty"),
        ({"prompt": "a", "answer": ["1"]}, "answer: must be text or a number"),
        ({"prompt": 3, "answer": "1"}, "text or a list of chat messages"),
        ({"prompt": [], "answer": "1"}, "text or a list of chat messages"),
        ({"prompt": [{"role": "boss", "content": "a"}], "answer": "1"}, r"prompt\[0\]: role must be one of"),
        ({"prompt": [{"role": "user", "content": 1}], "answer": "1"}, "content must be text"),
        ({"prompt": [{"role": "assistant", "content": "a"}], "answer": "1"}, "ends with the assistant's turn"),
        ({"prompt": "a", "answer": "1", "notes": "x" * 70_000}, "at most 65280"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, record, message):
    with pytest.raises(DataError, match=message):
        read_rows(write(tmp_path / "d.jsonl", record))


def test_missing_empty_and_wrong_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="not a file"):
        read_rows(tmp_path)
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(write(tmp_path / "d.jsonl", ""))
    (tmp_path / "d.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="not a readable parquet file"):
        read_rows(tmp_path / "d.parquet")
