"""Files and rewards of a run's sources, as its document says them, are those of its checked configuration."""

from __future__ import annotations

import pytest

from console.config.config import RunConfig
from console.config.data_section import data_files, run_reward, source_rewards
from penstock.config import Document


@pytest.mark.parametrize(
    "data",
    [
        {"train": "t.jsonl", "eval": "e.jsonl"},
        {"train": None},
        {"train": {"name": "a", "path": "a.jsonl", "eval": "s3://bucket/e.jsonl", "reward": "math"}},
        {"train": {"reasoning_gym": "chain_sum", "level": 1}, "eval": "reasoning_gym:chain_sum"},
        {
            "train": [
                {"name": "task", "path": "reasoning_gym:chain_sum", "eval": "held_out.jsonl"},
                {"name": "a", "path": "a.jsonl"},
                {"name": "b", "path": "b.jsonl", "reward": {"model": "numeric"}},
            ],
            "eval": [{"name": "b", "path": "e.jsonl"}, {"name": "c", "path": "c.jsonl", "reward": "math"}],
        },
    ],
)
def test_a_document_says_what_its_configuration_says(data: Document) -> None:
    document = {"model": {"path": "m"}, "data": data}
    config = RunConfig.model_validate(document)
    found = {setting: str(holder[key]) for setting, holder, key in data_files(data)}
    assert found == {setting: str(source) for setting, source in config.data.files.items()}
    assert {name: reward["model"] for name, reward in source_rewards(data).items()} == {
        name: reward.model for name, reward in config.source_rewards.items()
    }
    assert run_reward(document).get("model", "exact_match") == config.reward.model
