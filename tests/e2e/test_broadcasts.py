"""A run whose weights are broadcast over gloo: real processes, one of which is killed."""

import json

import pytest

from quickstart.prepare import Prepared
from tests.e2e.runs import assert_balanced, running, small_run
from tests.helpers.models.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.grid, pytest.mark.timeout(600)]


@pytest.fixture
def task(tmp_path):
    """An untrained model: what matters here is how its versions travel."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(64)))
    return Prepared(model_dir=make_tiny_model(tmp_path / "model"), train_path=path, eval_path=path)


def broadcasts_in(log):
    """Number of receivers of each broadcast that went well."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split("num_receivers=")[1].split()[0]) for line in lines if "weights broadcast" in line]


def test_generators_take_versions_from_broadcasts_and_one_that_dies_is_done_without(task, tmp_path):
    document = small_run(task, tmp_path, generator__count=2, run__num_steps=12)
    # All rewards are alike: without the decay no version would differ from the last one, and nothing would travel.
    document["optimizer"]["weight_decay"] = 1.0
    document["weights"] = {"transport": "gloo"}
    with running(document, tmp_path) as run:
        log = run.folder.logs / "trainer.log"
        run.wait_for("broadcast to both", lambda: 2 in broadcasts_in(log))
        run.kill("generator-1")
        run.wait_for("broadcast after the death", lambda: broadcasts_in(log)[-1:] in ([1], [2]))
        assert run.end() == 0, run.text
        summary = run.summary()
    assert_balanced(summary, num_samples=12 * 8 * 4)
    assert summary["max_staleness_seen"] <= 1
    # The first one that is alone again, or the two after the restart: the group was formed anew by itself.
    broadcasts = broadcasts_in(log)
    assert len(broadcasts) >= 4
