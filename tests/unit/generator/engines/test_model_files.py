from __future__ import annotations

import json

import pytest

from penstock.model.model_folder import model_size
from services.generator.engine.model_files import IdText, end_token_ids, load_text_decoder


def write(folder, name, document):
    (folder / name).write_text(json.dumps(document), encoding="utf-8")


def test_end_ids_come_from_both_files(tmp_path):
    write(tmp_path, "config.json", {"eos_token_id": 2})
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 2]})
    assert end_token_ids(tmp_path) == (2, 7)


def test_a_folder_without_configs_has_no_end_ids(tmp_path):
    assert end_token_ids(tmp_path) == ()
    assert model_size(tmp_path, "vocab_size") is None


@pytest.mark.parametrize("value", ["two", [2, "x"], -1, True, []])
def test_an_end_id_that_is_none_is_refused(tmp_path, value):
    write(tmp_path, "config.json", {"eos_token_id": value})
    with pytest.raises(ValueError, match="eos_token_id"):
        end_token_ids(tmp_path)


def test_sizes_are_read_and_checked(tmp_path):
    write(tmp_path, "config.json", {"vocab_size": 99, "max_position_embeddings": "long"})
    assert model_size(tmp_path, "vocab_size") == 99
    with pytest.raises(ValueError, match="max_position_embeddings"):
        model_size(tmp_path, "max_position_embeddings")


def test_text_leaves_special_tokens_out(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_text_decoder(tmp_path, is_tokenizer_needed=True).decode([1, 2, 1, 0]) == "aba"


def test_an_emulated_model_without_tokenizer_speaks_in_numbers(tmp_path):
    decoder = load_text_decoder(tmp_path, is_tokenizer_needed=False)
    assert isinstance(decoder, IdText)
    assert decoder.decode([3, 1]) == "3 1"
