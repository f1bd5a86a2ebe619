"""The quick start's model and tokenizer as an ordinary Hugging Face directory."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quickstart.arithmetic import ANSWER_MARKER
from quickstart.tiny_model import build_model, build_tokenizer, save_model


def test_every_character_is_one_token_and_the_marker_is_one() -> None:
    tokenizer = build_tokenizer()
    text = f"b7+12=19\n{ANSWER_MARKER}19"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) - len(ANSWER_MARKER) + 1
    assert tokenizer.decode(ids) == text


def test_any_text_survives_a_round_trip() -> None:
    tokenizer = build_tokenizer()
    text = "Was it 5 \u20ac?\tYes,  it was."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_chat_of_one_message_equals_its_text() -> None:
    tokenizer = build_tokenizer()
    messages = [{"role": "user", "content": "a12 b7="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "a12 b7="


def test_saved_directory_loads_to_the_same_model_and_tokenizer(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    save_model(model, tokenizer, tmp_path)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokenizer.encode("a12 b7=b7+12=19\n#### 19")
    assert loaded_tokenizer.encode("a12 b7=b7+12=19\n#### 19") == ids
    assert loaded_tokenizer.eos_token_id == loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert loaded_tokenizer.chat_template == tokenizer.chat_template
    batch = torch.tensor([ids])
    torch.testing.assert_close(loaded(batch).logits, model(batch).logits)


def test_model_has_between_one_and_three_million_parameters() -> None:
    model = build_model(build_tokenizer(), seed=0)
    assert 1_000_000 <= model.num_parameters() <= 3_000_000
    assert not model.config.tie_word_embeddings


@pytest.mark.parametrize("seed", [1, 2])
def test_weights_follow_from_the_seed(seed: int) -> None:
    tokenizer = build_tokenizer()
    head = build_model(tokenizer, seed=0).lm_head.weight
    assert torch.equal(build_model(tokenizer, seed=0).lm_head.weight, head)
    assert not torch.equal(build_model(tokenizer, seed=seed).lm_head.weight, head)
