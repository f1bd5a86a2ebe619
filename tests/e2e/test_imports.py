"""Tasks of other packages are trained on by one line of configuration."""

import pytest
import yaml

from tests.e2e.runs import assert_balanced, running, small_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_task_of_reasoning_gym_is_trained_on_with_its_own_scorer(task, tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    document = small_run(task, tmp_path, run__num_steps=2, run__num_eval_prompts=4, sampling__max_new_tokens=16)
    del document["reward"]
    easy = {"reasoning_gym": "chain_sum", "config": {"max_terms": 2, "max_digits": 1, "min_digits": 1}}
    document["data"] |= {"train": easy, "eval": {**easy, "size": 3}}
    with running(document, tmp_path) as run:
        assert run.end() == 0, run.text
        assert_balanced(run.summary(), num_samples=2 * 8 * 4)
    config = yaml.safe_load((run.folder.path / "config.yaml").read_text())
    assert config["reward"]["model"] == "reasoning_gym"
