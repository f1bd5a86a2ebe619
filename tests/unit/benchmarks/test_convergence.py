"""The convergence benchmark's cells: on-policy they are the plain loop, bit for bit; behind it they are not."""

import json

import pytest

from benchmarks.trainer.cells import PLAIN, Cell, run_cell
from benchmarks.trainer.convergence import table
from services.trainer.config import TrainingConfig
from tests.helpers.models.tiny_model import make_tiny_model

NUM_STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    for name, count in (("train", 12), ("eval", 3)):
        rows = "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(count))
        (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    return TrainingConfig.model_validate(
        {
            "run": {"num_steps": NUM_STEPS, "num_eval_prompts": 3},
            "model": {"path": make_tiny_model(folder / "model"), "dtype": "float32"},
            "data": {"train": folder / "train.jsonl", "eval": folder / "eval.jsonl"},
            "sampling": {"max_new_tokens": 8},
            "algorithm": {"name": "dr_grpo", "normalization": "tokens", "group_size": 3, "prompts_per_step": 2},
            "optimizer": {"learning_rate": 1e-2},
            "trainer": {"device": "cpu"},
        }
    )


def outcome(config, **cell):
    def vowels(item):
        """A reward that varies within groups, as an untrained model's right answers would not."""
        return sum(item.completion.count(letter) for letter in "aeiou") / 8

    return run_cell(config, Cell(**{"lag": 0, "seed": 5} | cell), on_step=lambda *_: None, score=vowels)


def digests(found):
    return [step.digest for step in found.steps]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_without_staleness_every_batch_is_that_of_the_plain_loop_bit_for_bit(config, minibatches):
    plain, found = (outcome(config, correction=name, minibatches=minibatches) for name in (PLAIN, "none"))
    assert digests(found) == digests(plain)
    assert found.held_out == plain.held_out
    assert len(set(digests(plain))) == NUM_STEPS


def test_another_seed_and_more_optimiser_steps_give_other_batches(config):
    plain = digests(outcome(config, correction=PLAIN))
    assert digests(outcome(config, correction="none", seed=6))[0] != plain[0]
    split = digests(outcome(config, correction="none", minibatches=2))
    assert [split[0] == plain[0], split[1] == plain[1]] == [True, False]


def test_samples_that_lag_come_from_older_weights(config):
    plain, late = outcome(config, correction=PLAIN), outcome(config, correction="truncated", lag=2)
    assert digests(late)[0] == digests(plain)[0]
    assert digests(late)[1] != digests(plain)[1]
    # Versions 0, 1 and 2 are trained from samples of version 0.
    assert [step.metrics["ratio"] == pytest.approx(1.0, abs=1e-4) for step in late.steps[:3]] == [True, False, False]


def test_the_table_has_a_row_for_each_lag_and_correction(config):
    documents = [outcome(config, correction=name).document() for name in (PLAIN, "none")]
    rows = list(table(documents))
    assert [row.split("|")[1].strip() for row in rows[2:]] == [PLAIN, "0, none"]
