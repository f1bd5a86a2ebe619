"""A mesh into which a model does not fit is refused by its config.json, before another process starts."""

from __future__ import annotations

import pytest

from services.trainer.distributed import launch
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.run.policy_loading import load_policy
from tests.helpers.models.model_families import tiny_config
from tests.helpers.trainers.two_processes import config_of


@pytest.mark.parametrize(
    ("family", "changes", "parallel", "told"),
    [
        ("qwen2", {"num_hidden_layers": 3}, {"pipeline": 4}, "pipeline: 4 stages need as many layers, and .* has 3"),
        ("qwen2", {}, {"pipeline": 2, "layers_per_stage": [1, 3]}, r"layers_per_stage: \[1, 3\] are 4 layers, and"),
        ("gemma3_text", {}, {"pipeline": 2}, "pipeline: gemma3_text cannot be cut into stages, only llama, "),
        ("qwen2", {}, {"tensor": 4}, "tensor: 4 does not divide num_key_value_heads 2 of .*; change it"),
        (
            "qwen3",
            {},
            {"expert": 2},
            "expert: experts of qwen3 cannot be divided, only those of olmoe, qwen3_moe; leave",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_a_process_starts(
    tmp_path, monkeypatch, family, changes, parallel, told
):
    # There are no weights: nobody gets as far as to read them.
    tiny_config(family, **changes).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER, encoding="utf-8")
    monkeypatch.setattr(launch, "start_rank", lambda _: pytest.fail("a process was started"))
    with pytest.raises(UnsupportedModelError, match=f"trainer.parallel.{told}"):
        load_policy(config_of(tmp_path, processes=4, parallel=parallel))


TOKENIZER = (
    """{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"""
)
