import json

import numpy as np
import pytest

from penstock.config import ConfigError
from penstock.errors import InvalidFieldError
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths.ngrams import ngrams
from services.scheduler.lengths.pairs_file import read_pairs
from services.scheduler.lengths.prompt_features import MAX_END_TOKENS, make_prompt, read_prompt


def ids(*values):
    return np.array(values, dtype=np.uint32)


def test_prompts_are_distinguished_by_content_and_not_by_group():
    def key(**fields):
        return read_prompt(pb.LengthQuery(**fields)).key

    one_two = ids(1, 2).tobytes()
    assert key(group_id="a", prompt_token_ids=one_two) == key(group_id="b", prompt_token_ids=one_two)
    assert key(prompt_token_ids=one_two) != key(prompt_token_ids=ids(2, 1).tobytes())
    assert key(prompt_text="two words") != key(prompt_token_ids=one_two)
    assert key(group_id="a") != key(group_id="b")
    assert not read_prompt(pb.LengthQuery(group_id="a", num_prompt_tokens=3)).has_content


def test_long_prompts_are_cut_in_the_middle_and_keep_their_length():
    prompt = make_prompt(np.arange(10_000, dtype=np.uint32), "")
    assert len(prompt.words) == 2 * MAX_END_TOKENS
    assert (prompt.words[0], prompt.words[-1], prompt.num_tokens) == (0, 9_999, 10_000)


@pytest.mark.parametrize(
    "query",
    [
        pb.LengthQuery(prompt_token_ids=b"12345"),
        pb.LengthQuery(group_id="g" * 257),
    ],
)
def test_queries_that_cannot_be_read_are_refused(query):
    with pytest.raises(InvalidFieldError):
        read_prompt(query)


def test_ngrams_are_single_words_and_pairs_of_one_prompt():
    both = ngrams([make_prompt(ids(5, 6, 5), ""), make_prompt(ids(5, 6), ""), make_prompt(ids(), "")])
    first, second = ngrams([make_prompt(ids(5, 6, 5), "")]), ngrams([make_prompt(ids(5, 6), "")])
    # 5 (twice), 6, 5-6, 6-5; then 5, 6, 5-6: the pair across the border of two prompts, 5-5, is none.
    assert len(first.buckets) == 4
    assert sorted(first.values)[-1] == pytest.approx(np.log(3))
    assert set(second.buckets) <= set(first.buckets)
    assert list(both.rows) == [0, 0, 0, 0, 1, 1, 1]
    assert list(both.buckets) == [*first.buckets, *second.buckets]
    assert both.lengths[2] == 0.0


def test_a_file_of_pairs_may_be_a_recording(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "a sum", "prompt_token_ids": [1, 2], "token_ids": [9] * 7, "score": None},
        {"prompt": "only text", "num_completion_tokens": 3},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    (first, first_log), (second, second_log) = read_pairs(path)
    assert (list(first.words), round(np.exp(first_log))) == ([1, 2], 7)
    assert (second.num_tokens, round(np.exp(second_log))) == (2, 3)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"num_completion_tokens": 1}', "needs prompt_token_ids"),
        ('{"prompt": "p"}', "num_completion_tokens"),
        ('{"prompt": "p", "num_completion_tokens": -1}', "num_completion_tokens"),
        ('{"prompt_token_ids": [4294967296], "num_completion_tokens": 1}', "prompt_token_ids"),
        ("", "holds no rows"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(tmp_path, row, says):
    path = tmp_path / "pairs.jsonl"
    path.write_text(row, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_pairs(path)
