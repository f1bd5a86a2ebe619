"""Experts multiply in the type in which a run computes, as all other layers do."""

import numpy as np
from transformers import AutoModelForCausalLM

from tests.helpers.models.model_families import save_tiny
from tests.helpers.trainers.equal_training import random_trajectories, train
from tests.helpers.trainers.two_processes import alone, scores


def test_before_the_first_step_a_mixture_is_its_reference_to_the_last_bit(tmp_path):
    path = save_tiny("qwen3_moe", tmp_path)
    AutoModelForCausalLM.from_pretrained(path).bfloat16().save_pretrained(path)
    backend = alone(path, dtype="bfloat16", algorithm={"name": "dapo", "kl_coefficient": 0.1})
    trajectories = random_trajectories(9)
    found, expected = (scores(backend, trajectories, quantity) for quantity in ("logprobs", "reference_logprobs"))
    assert np.array_equal(found, expected)
    before = {name: each.detach().clone() for name, each in backend._learner.parameters.items() if "experts" in name}
    train(backend, 1)
    # Gradients reach the weights that are held in float32.
    assert all((backend._learner.parameters[name] != each).any() for name, each in before.items())
    assert before
