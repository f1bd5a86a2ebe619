"""How layers are divided over stages, and what cannot be."""

from dataclasses import replace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import STATE_BYTES, TrainingMode, held_bytes
from services.trainer.distributed.stages import Stage, divided
from services.trainer.model.backend import UnsupportedModelError
from tests.helpers.models.model_families import FAMILIES, save_tiny


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "given", "sizes"),
    [(4, 2, None, [2, 2]), (5, 3, None, [2, 2, 1]), (7, 4, None, [2, 2, 2, 1]), (4, 2, (1, 3), [1, 3])],
)
def test_stages_are_as_even_as_possible_or_as_stated(num_layers, num_stages, given, sizes):
    ranges = divided(num_layers, num_stages=num_stages, layers_per_stage=given, model="m")
    assert [len(each) for each in ranges] == sizes
    assert [layer for each in ranges for layer in each] == list(range(num_layers))


@pytest.mark.parametrize(
    ("num_stages", "given", "told"),
    [
        (5, None, "trainer.parallel.pipeline: 5 stages need as many layers, and m has 4; lower it"),
        (2, (1, 4), "trainer.parallel.layers_per_stage: [1, 4] are 5 layers, and m has 4"),
    ],
)
def test_other_numbers_of_layers_are_refused_by_name(num_stages, given, told):
    with pytest.raises(UnsupportedModelError) as caught:
        divided(4, num_stages=num_stages, layers_per_stage=given, model="m")
    assert told in str(caught.value)


def test_a_family_whose_modules_are_not_known_is_refused_by_name():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", vocab_size=96, n_embd=32, n_layer=2, n_head=4)
    )
    with pytest.raises(UnsupportedModelError, match="pipeline: gpt2 cannot be cut into stages, only llama, olmoe"):
        Stage(index=0, num_stages=2).cut(model, None)


def test_stages_hold_every_tensor_once_but_tied_embeddings():
    settings = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    settings |= FAMILIES["llama"] | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    held = []
    for index in range(3):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))
        whole = set(dict(model.named_parameters()))
        stage = Stage(index=index, num_stages=3)
        stage.cut(model, None)
        held.append(set(dict(model.named_parameters())))
        assert held[-1] | stage.elsewhere.keys() == whole
        assert not held[-1] & stage.elsewhere.keys()
    assert held[0] & held[2] == {"model.embed_tokens.weight"}
    assert sum(map(len, held)) == len(whole) + 1


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_formula_of_memory_counts_each_stage_s_weights(tmp_path, is_tied):
    folder = save_tiny("qwen3", tmp_path, num_hidden_layers=4, tie_word_embeddings=is_tied)
    shape, mode = read_shape(folder), TrainingMode(num_shards=1, pack_tokens=8, is_half=False)
    for index, num_layers in enumerate((1, 2, 1)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        Stage(index=index, num_stages=3).cut(model, (1, 2, 1))
        held = sum(parameter.numel() for parameter in model.parameters())
        stage = shape.stage(num_layers, is_first=index == 0, is_last=index == 2)
        # The last norm is divided over all layers.
        assert stage.num_params == pytest.approx(held, abs=model.config.hidden_size)
        critic = AutoModelForCausalLM.from_pretrained(folder)
        Stage(index=index, num_stages=3).cut(critic, (1, 2, 1), has_output=False)
        beside = held_bytes(stage, replace(mode, has_critic=True)) - held_bytes(stage, mode)
        held = sum(parameter.numel() for parameter in critic.parameters())
        assert beside / STATE_BYTES == pytest.approx(held, abs=model.config.hidden_size)
