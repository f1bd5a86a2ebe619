"""Data rows: aliases, chat, parquet, and one clear line for each thing that is wrong."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from services.trainer.data.prompt_rows import DataError, Message, read_rows
from services.trainer.data.tokenizer import HuggingFaceTokenizer
from tests.helpers.models.tiny_model import make_tokenizer


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


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}
SLIME = {"prompt": [{"role": "user", "content": "2+2?"}], "label": "4", "metadata": {"rm_type": "math"}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TURNS = [{"role": "system", "content": "brief"}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
MESSAGES = {"messages": [*TURNS, {"role": "assistant", "content": "4"}], "tools": TOOLS}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_data_sets_of_trl_verl_and_slime_are_read_as_they_are(tmp_path, suffix):
    found = {}
    for name, record in {"verl": VERL, "slime": SLIME, "TRL": MESSAGES}.items():
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".jsonl":
            write(path, record)
        else:
            # A column has one type.
            parts = [turn["content"] for turn in record.get("messages", [])]
            texts = [part if isinstance(part, str) else part[0]["text"] for part in parts]
            turns = [{**turn, "content": text} for turn, text in zip(record.get("messages", []), texts, strict=True)]
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**record, "messages": turns or None}]), path)
        (found[name],) = read_rows(path)

    assert all(row.answer == "4" and row.prompt[-1] == Message(role="user", content="2+2?") for row in found.values())
    verl, slime = (json.loads(found[name].metadata_json) for name in ("verl", "slime"))
    assert verl["data_source"] == "openai/gsm8k"
    assert verl["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert verl["extra_info"] == {"split": "train", "index": 0}
    assert slime["metadata"] == {"rm_type": "math"}
    assert json.loads(found["TRL"].tools_json) == TOOLS
    assert {name: row.shape.split(" ")[0] for name, row in found.items()} == {name: name for name in found}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({**MESSAGES, "prompt": "2+2?"}, "messages and prompt: two prompts that differ"),
        ({**MESSAGES, "answer": "4"}, "messages: ends with the assistant's turn, and answer"),
        ({**VERL, "answer": "5"}, "answer and reward_model.ground_truth: two answers that differ"),
        ({**VERL, "reward_model": {"style": "model"}}, "no answer, .* reward_model.ground_truth"),
        ({**VERL, "images": [{"bytes": "..."}]}, "images: prompts of text alone"),
        ({**SLIME, "prompt": "2+2?", "tools": TOOLS}, "tools: are shown by the chat template"),
        ({**SLIME, "tools": "[{"}, "tools: not valid JSON"),
        ({**SLIME, "tools": {"name": "add"}}, "tools: must be a list of objects"),
        ({**SLIME, "tools": [{"name": "x" * 300_000}]}, "tools: 1 tools of"),
        ({**SLIME, "prompt": [{"role": "assistant", "content": "", "tool_calls": [{}]}, *TURNS]}, "tool_calls"),
        ({**SLIME, "prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "part that is not text"),
    ],
)
def test_a_row_of_theirs_that_is_ambiguous_names_the_column(tmp_path, changed, message):
    with pytest.raises(DataError, match=rf"line 1: .*{message}"):
        read_rows(write(tmp_path / "d.jsonl", changed), needs_answer="exact_match")


def test_a_row_of_nemo_gym_is_its_servers_own(tmp_path):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
    params = {
        "input": [{"role": "developer", "content": "brief"}, {"role": "user", "content": "2+2?"}],
        "tools": [tool],
    }
    record = {"responses_create_params": params, "expected": 4}
    (row,) = read_rows(write(tmp_path / "d.jsonl", record))
    assert row.prompt == (Message(role="system", content="brief"), Message(role="user", content="2+2?"))
    assert json.loads(row.tools_json)[0]["function"] == {key: tool[key] for key in ("name", "parameters", "strict")}
    assert (row.answer, json.loads(row.metadata_json)) == ("", record)
    with pytest.raises(DataError, match=r"responses_create_params\.input: missing"):
        read_rows(write(tmp_path / "d.jsonl", {"responses_create_params": {}}))


def test_what_a_verl_grader_needs_beyond_a_text_is_json(tmp_path):
    truth = {"target": 24, "numbers": [1, 2, 3, 4]}
    (row,) = read_rows(write(tmp_path / "d.jsonl", {**VERL, "reward_model": {"ground_truth": truth}}))
    assert json.loads(row.answer) == truth


def test_tools_go_to_the_chat_template_or_are_an_error(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    turns = [("user", "2+2?")]
    tokenizer._tokenizer.chat_template = "{{ messages[0]['content'] }}{% for tool in tools or [] %}!{% endfor %}"
    plain, shown = tokenizer.encode_chat(turns), tokenizer.encode_chat(turns, TOOLS)
    assert shown[: len(plain)] == plain
    assert len(shown) == len(plain) + 1
    blind = HuggingFaceTokenizer(tmp_path)
    blind._tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(DataError, match="tools: the model's chat template does not show them"):
        blind.encode_chat(turns, TOOLS)
