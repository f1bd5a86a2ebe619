"""The order of prompts: seeded, resumable, and never cut."""

import json

import pytest

from penstock.v1 import types_pb2
from penstock.wire.codec import int32_array
from services.trainer.data.prompt_order import (
    MAX_SAMPLING_SEED,
    EncodedPrompt,
    build_prompt,
    evaluation_group_id,
    load_prompts,
    sampling_seed,
    training_group_id,
    training_position,
)
from services.trainer.data.prompt_rows import DataError, Message, Row


class CharacterTokenizer:
    def encode_texts(self, texts):
        return [[ord(character) for character in text] for text in texts]

    def note_environment(self, *, tools, opens):
        raise AssertionError("not here")

    def encode_chat(self, messages):
        return [ord(character) for _, content in messages for character in content]


def encoded(text):
    row = Row(prompt=text, answer="1", metadata_json="{}")
    return EncodedPrompt(row=row, token_ids=tuple(map(ord, text)))


def write_rows(path, *prompts):
    lines = (json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_seeds_differ_between_positions_and_runs_and_fit():
    seeds = {sampling_seed(run, position) for run in range(3) for position in range(200)}
    assert len(seeds) == 600
    assert max(seeds) < MAX_SAMPLING_SEED
    assert sampling_seed(1, 5) == sampling_seed(1, 5)


def test_long_prompts_are_left_out_and_counted_and_all_long_is_an_error(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", "a", "bbbb", "cc", "ddddd")
    prompts = load_prompts(path, CharacterTokenizer(), max_prompt_tokens=3)
    assert [prompt.row.prompt for prompt in prompts.prompts] == ["a", "cc"]
    assert prompts.num_skipped == 2
    with pytest.raises(DataError, match=r"longer than data.max_prompt_tokens = 3 tokens \(the shortest has 4\)"):
        load_prompts(write_rows(tmp_path / "e.jsonl", "bbbb", "ddddd"), CharacterTokenizer(), max_prompt_tokens=3)


def test_text_and_chat_rows_keep_their_order(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", "ab", [{"role": "user", "content": "c"}], "d")
    prompts = load_prompts(path, CharacterTokenizer(), max_prompt_tokens=9).prompts
    assert [bytes(prompt.token_ids) for prompt in prompts] == [b"ab", b"c", b"d"]


def test_group_names_say_what_they_are_and_differ_after_a_rewind():
    assert training_position(training_group_id(17)) == 17
    names = {
        evaluation_group_id(policy_version=3, history=history, is_greedy=is_greedy, index=2)
        for history in (0, 1)
        for is_greedy in (False, True)
    }
    assert names == {"e3s2", "e3g2", "h1e3s2", "h1e3g2"}


def test_a_prompt_message_holds_tokens_text_or_turns_and_the_answer():
    sampling = types_pb2.SamplingParams(max_new_tokens=4)
    options = {"group_id": "t0", "group_size": 2, "sampling": sampling, "purpose": types_pb2.PURPOSE_TRAIN}
    text = build_prompt(encoded("ab"), **options)
    assert int32_array(text.token_ids, "x").tolist() == [97, 98]
    assert (text.text, text.answer, len(text.messages)) == ("ab", "1", 0)
    row = Row(prompt=(Message(role="user", content="hi"),), answer="2", metadata_json='{"k": 1}')
    chat = build_prompt(EncodedPrompt(row=row, token_ids=(1,)), **options)
    assert (chat.text, chat.messages[0].content, chat.metadata_json) == ("", "hi", '{"k": 1}')
