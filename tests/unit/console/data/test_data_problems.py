"""What is wrong with a run's data, before anything is started."""

import json

from console.config.config import RunConfig
from console.run.model_check import data_problems


def test_answers_are_asked_for_where_only_a_reward_that_compares_can_score(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2?"}) + "\n")

    def problems(train, **keys):
        document = {"model": {"path": str(tmp_path)}, "data": {"train": train}, **keys}
        return data_problems(RunConfig.model_validate(document))[0]

    rows = str(tmp_path / "rows.jsonl")
    (found,) = problems(rows)
    assert "no answer, which the reward exact_match needs" in found
    assert problems(rows, environment="grpc://127.0.0.1:7311") == []
    assert problems(rows, reward={"model": "length", "length": {"target_tokens": 9}}) == []

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sources = [{"name": "sums", "path": "reasoning_gym:chain_sum"}, {"name": "b", "path": rows, "reward": "code"}]
    (found,) = problems(sources)
    assert found.startswith("data.train.0.path: reasoning_gym:chain_sum needs the package reasoning-gym")
