"""Lengths of prompts by the model's tokenizer."""

import pytest

from console.plan.lengths import MAX_ROWS, read_lengths
from penstock.config import ConfigError
from tests.helpers.console import write_rows
from tests.helpers.models.tiny_model import make_tokenizer


@pytest.fixture
def rows(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "model")
    lengths = [3] * MAX_ROWS + [9] * MAX_ROWS + [40]
    return write_rows(tmp_path / "rows.jsonl", *({"prompt": "1" * length, "answer": "1"} for length in lengths))


def test_prompts_are_sampled_over_the_whole_file_without_those_that_a_run_leaves_out(rows, tmp_path):
    found = read_lengths(rows, tmp_path / "model", max_prompt_tokens=20)
    assert (found.prompt_tokens, found.completion_tokens) == (6.0, ())
    with pytest.raises(ConfigError, match=r"every prompt is longer than data\.max_prompt_tokens = 2"):
        read_lengths(rows, tmp_path / "model", max_prompt_tokens=2)
