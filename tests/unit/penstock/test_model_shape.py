"""A model's shape from its folder alone; `test_training_memory` compares the formulas made of it with allocations."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.model.decoder_shape import ModelShape
from penstock.model.model_shape import read_numbers, read_shape

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
EMBEDDING, LAYERS = (32, 8), (2, 100)


@pytest.fixture
def folder(tmp_path):
    """Writes a model's folder."""

    def write(config, **files):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for name, shapes in files.items():
            tensors = {tensor: np.zeros(shape, np.float16) for tensor, shape in shapes.items()}
            save_file(tensors, tmp_path / f"{name}.safetensors")
        return tmp_path

    return write


def test_numbers_are_those_of_the_configuration_and_of_the_tensors(folder):
    path = folder(CONFIG, model={"model.embed": EMBEDDING, "model.gate_proj": LAYERS})
    assert read_shape(path) == ModelShape(
        num_params=456,
        num_layers=2,
        hidden=8,
        feed_forward=12,
        query_width=16,
        key_width=8,
        vocab=32,
        is_tied=True,
        dense_feed_forward=12,
        has_query_norms=False,
    )


def test_an_output_layer_that_is_tied_counts_once(folder):
    tensors = {"model.embed": EMBEDDING, "model.layers": LAYERS, "lm_head.weight": EMBEDDING}
    assert read_shape(folder({**CONFIG, "tie_word_embeddings": True}, model=tensors)).num_params == 456
    untied = read_shape(folder(CONFIG, model=tensors))
    assert (untied.num_params, untied.is_tied) == (456 + 256, False)


def test_parts_are_those_that_the_index_names(folder):
    path = folder(CONFIG, a={"x": EMBEDDING}, b={"y": LAYERS}, adapter_model={"z": LAYERS})
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert read_shape(path).num_params == 456


def test_experts_count_as_wide_as_those_that_a_token_is_sent_to(folder):
    config = {**CONFIG, "num_experts_per_tok": 3, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7}
    assert read_shape(folder(config, model={"x": LAYERS})).feed_forward == 22


def test_numbers_of_a_planning_problem_are_those_of_the_folder(folder):
    layers = {
        f"model.layers.{index}.mlp.{name}": LAYERS for index, name in ((0, "gate_proj"), (1, "experts.0.up_proj"))
    }
    config = {**CONFIG, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    numbers = read_numbers(folder({**config, "n_shared_experts": 1}, model={"model.embed": EMBEDDING, **layers}))
    dense = {"params": 656, "layers": 2, "hidden": 8, "q_heads": 4, "kv_heads": 2, "head_dim": 4, "vocab": 32}
    mixture = {"experts": 4, "experts_per_token": 2, "expert_ffn": 5, "expert_layers": 1, "shared_ffn": 5}
    assert numbers == {**dense, "tied_embeddings": True, **mixture}
    assert read_numbers(folder(CONFIG, model={"x": LAYERS}))["ffn"] == 12


def test_where_every_expert_computes_every_token_all_count(folder):
    config = {**CONFIG, "model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1}
    shape = read_shape(folder(config, model={"x": LAYERS}))
    assert (shape.num_chosen_experts, shape.feed_forward, shape.num_feed_forward_copies) == (4, (4 + 1) * 12, 4)


def test_a_network_without_a_gate_keeps_what_its_activation_function_keeps(folder):
    plain = read_shape(folder({**CONFIG, "hidden_act": "gelu"}, model={"x": LAYERS}))
    assert (plain.feed_forward, plain.num_feed_forward_copies) == (12, 2)
    # The width that GPT-2 states is n_inner.
    config = {**CONFIG, "n_inner": None, "activation_function": "gelu_new"}
    shape = read_shape(folder(config, model={"x": LAYERS}))
    assert (shape.feed_forward, shape.num_feed_forward_copies) == (32, 5)


def test_names_of_tensors_tell_norms_fused_queries_and_sinks(folder):
    layer = "model.layers.0."
    names = ("self_attn.qkv_proj.weight", "self_attn.sinks", "self_attn.q_norm.weight", "mlp.gate_up_proj.weight")
    plain = read_shape(folder(CONFIG, model={"x": LAYERS}))
    assert not any((plain.has_query_norms, plain.has_fused_queries, plain.has_sinks, plain.ends_in_norms))
    assert plain.num_norm_copies == 2
    tensors = {layer + name: LAYERS for name in names} | {layer + "input_layernorm.bias": (8,)}
    shape = read_shape(folder(CONFIG, model=tensors | {layer + "post_mlp_layernorm.weight": (8,)}))
    assert (shape.has_query_norms, shape.has_fused_queries, shape.has_sinks, shape.ends_in_norms) == (True,) * 4
    # A norm with a bias is a fused one; two linear layers in one of two layers.
    assert (shape.num_norm_copies, shape.num_inputs) == (1, 1.0)


def test_latent_attention_has_keys_of_both_parts(folder):
    latent = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2}
    shape = read_shape(folder(CONFIG | latent, model={"x": LAYERS}))
    assert (shape.latent_width, shape.query_width, shape.key_width) == (11, 4 * 5, 2 * 5)


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({}, 16),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 16),
        ({"layer_types": ["full_attention"] * 2}, None),
        ({"use_sliding_window": False}, None),
        ({"sliding_window": None, "attention_chunk_size": 9, "layer_types": ["chunked_attention"] * 2}, 9),
    ],
)
def test_a_window_counts_where_some_layer_has_it(folder, change, window):
    assert read_shape(folder({**CONFIG, "sliding_window": 16} | change, model={"x": LAYERS})).window == window


def test_layers_without_experts_are_recognised_by_the_files(folder):
    config = {**CONFIG, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    layers = {f"model.layers.{index}.mlp.{name}": LAYERS for index, name in ((0, "up_proj"), (1, "experts.0.up_proj"))}
    shape = read_shape(folder(config, model={"model.embed": EMBEDDING} | layers))
    assert (shape.num_dense_layers, shape.dense_feed_forward, shape.feed_forward) == (1, 12, 10)
    assert shape.largest_layer_params == 200 / 2 + 200
    assert shape.layer_params == 200


def test_a_language_model_within_another_is_read(folder):
    config = {"text_config": CONFIG, "tie_word_embeddings": False}
    shape = read_shape(folder(config, model={"x": LAYERS}))
    assert (shape.hidden, shape.is_tied) == (8, False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": 0}, "config.json has no hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers in config.json must be a positive integer, not 'many'"),
        ({"vocab_size": -1}, "vocab_size in config.json must be a positive integer, not -1"),
    ],
)
def test_a_wrong_number_is_named(folder, change, reason):
    with pytest.raises(ValueError, match=reason):
        read_shape(folder(CONFIG | change, model={"x": LAYERS}))


def test_a_folder_without_weights_and_a_damaged_file_are_refused(folder):
    path = folder(CONFIG)
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors nor"):
        read_shape(path)
    (path / "model.safetensors").write_bytes((2**30).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_shape(path)
