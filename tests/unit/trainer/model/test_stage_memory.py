"""The formula of memory against tensors that exist in a process of a sharded stage."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import held_bytes, working_bytes
from services.trainer.algorithms.dapo import DAPO
from services.trainer.algorithms.loss import policy_loss
from services.trainer.batches.packing import join
from services.trainer.distributed.stage_backend import StageBackend
from services.trainer.model.model_loading import ModelSettings
from services.trainer.run.memory_fit import with_adapter
from services.trainer.run_sections import LoraSection, OptimizerConfig
from tests.helpers.tensor_memory import TensorMemory
from tests.helpers.trainers.lone_rank import LoneStage, lone_group
from tests.unit.trainer.builders import build_trajectory
from tests.unit.trainer.distributed.test_rank_backend import loss_with
from tests.unit.trainer.model.test_training_memory import SETTINGS, WIDE, mode_of

NUM_TOKENS = 512


def backend_of(path, ranks, **settings):
    return StageBackend(
        model=ModelSettings(path=path, **settings),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        loss=partial(policy_loss, algorithm=DAPO, settings=loss_with()),
        seed=0,
        ranks=ranks,
    )


def train(backend, *, count):
    """A pack of that many samples."""
    rng = np.random.default_rng(0)
    samples = [build_trajectory(rng, num_prompt=1, num_completion=NUM_TOKENS // count - 1) for _ in range(count)]
    backend.forward_backward(join(samples, [*range(count)]))
    # What was received is arbitrary, perhaps no number.
    backend.discard_gradients()
    backend.optimizer_step(divisor=1)


def measured(backend, *, count):
    parameters = list(backend._model.parameters())
    moments = [each for state in backend._learner.optimizer.state.values() for each in state.values() if each.dim()]
    gradients = [each.grad for each in parameters if each.grad is not None]
    memory = TensorMemory([each.detach() for each in (*parameters, *gradients, *moments)])
    with memory.counting():
        train(backend, count=count)
    return memory


def trained(path, index, **settings):
    """A stage's backend, and what it takes for a pack of one sample and of eight."""
    with lone_group(0, 4):
        backend = backend_of(path, LoneStage(2 * index, 4, num_stages=2), **settings)
        train(backend, count=1)
        return backend, *(measured(backend, count=count) for count in (1, 8))


@pytest.mark.parametrize(("dtype", "checkpoints_layers"), SETTINGS)
@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_needs_what_the_formula_says(tmp_path, index, dtype, checkpoints_layers):
    """Of a pack of one sample, which is one microbatch; of several no more."""
    model = AutoModelForCausalLM.from_config(Qwen3Config(**WIDE, tie_word_embeddings=False))
    model.bfloat16().save_pretrained(tmp_path)
    backend, of_one, of_eight = trained(tmp_path, index, dtype=dtype, gradient_checkpointing=checkpoints_layers)
    shape = read_shape(tmp_path).stage(2, is_first=index == 0, is_last=index == 1)
    mode = mode_of(backend, num_tokens=NUM_TOKENS, checkpoints_layers=checkpoints_layers)
    mode = replace(mode, num_shards=2, is_stage=True)
    assert held_bytes(shape, mode) == pytest.approx(of_one.held_bytes, rel=0.01)
    whole = held_bytes(shape, mode) + working_bytes(shape, mode)
    assert whole == pytest.approx(of_one.peak_bytes, rel=0.1)
    assert of_eight.peak_bytes < whole


@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_with_an_adapter_needs_what_the_formula_says(tmp_path, index):
    model = AutoModelForCausalLM.from_config(Qwen3Config(**WIDE, tie_word_embeddings=False))
    model.bfloat16().save_pretrained(tmp_path)
    lora = LoraSection(rank=8)
    backend, of_one, of_eight = trained(tmp_path, index, dtype="bfloat16", lora=lora)
    shape = read_shape(tmp_path).stage(2, is_first=index == 0, is_last=index == 1)
    mode = replace(mode_of(backend, num_tokens=NUM_TOKENS), num_shards=2, is_stage=True, has_adapter=True)
    mode = with_adapter(mode, lora, shape)
    assert held_bytes(shape, mode) == pytest.approx(of_one.held_bytes, rel=0.01)
    whole = held_bytes(shape, mode) + working_bytes(shape, mode)
    assert whole == pytest.approx(of_one.peak_bytes, rel=0.1)
    assert of_eight.peak_bytes < 1.1 * whole
