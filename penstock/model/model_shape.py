"""Reads a model's shape from its folder: config.json and the headers of its safetensors files. Light: no transformers.

Configurations name the same number differently; the names known here are those of the families that are trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

from penstock.model.decoder_shape import ModelShape
from penstock.model.digests import safetensors_shapes
from penstock.model.model_folder import read_mapping
from penstock.model.weight_index import INDEX_FILE

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_FEED_FORWARDS = ("intermediate_size", "ffn_dim", "ffn_hidden_size")
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "num_experts_per_token")
_ALL_EXPERTS_TYPES = ("llama4_text",)
"""Whose code sends every token to every expert, with a weight of zero to those not chosen, beside a shared one."""
_ACTIVATIONS = ("hidden_act", "activation_function")
_STEPS_KEPT = {"gelu_new": 3, "xielu": 3, "gpt_oss": 3}
"""Activation functions of several steps, or models that have one of their own: tensors that these keep for their
gradients beside input and result."""
_STEPS_MADE = {"xielu": 5}
"""Tensors that such a function makes in float32 as it computes."""
_NORM_COPIES = {"cohere2": 3}
"""Of hidden states, what a norm in several steps keeps."""
_EXPERT_WEIGHTS = ".experts."
_NORMS = ("norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
_NORM_BIASES = tuple(name.replace("weight", "bias") for name in _NORMS)
_LAST_NORMS = ("post_feedforward_layernorm.weight", "post_mlp_layernorm.weight")
_QUERY_NORMS = ("q_norm.weight", "query_layernorm.weight")
_FUSED_QUERIES = ("qkv_proj.weight", "query_key_value.weight", "c_attn.weight")
_INPUTS = (
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    *("gate_proj.weight", "up_proj.weight", "gate_up_proj.weight", "dense_h_to_4h.weight", "c_fc.weight"),
    *("gate.weight", "router.weight", "router.layer.weight", *_FUSED_QUERIES),
)
"""Linear layers that read hidden states."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
_EXPERT_LAYER = re.compile(r"layers\.(\d+)\..*experts?\.")
_TEXT = ("text_config", "llm_config")
"""Where models of several media keep their language model's configuration."""
_OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight")

Config = Mapping[str, object]


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a Hugging Face folder; its weights are not read.

    Raises:
        ValueError: A number is missing or no positive integer, there are no safetensors files, or one is damaged.
        OSError: A file cannot be read.
    """
    whole = read_mapping(folder / "config.json")
    try:
        return _shape(_text_config(whole), whole, _tensors(folder))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def read_numbers(folder: Path) -> dict[str, float]:
    """What a planning problem states of the model in a folder, by the problem's keys; raises as `read_shape` does."""
    shape, config = read_shape(folder), _text_config(read_mapping(folder / "config.json"))
    num_heads, head_size = _needed(config, _HEADS), _stated_head_size(config)
    numbers: dict[str, float] = {
        "params": shape.num_params,
        "layers": shape.num_layers,
        "hidden": shape.hidden,
        "q_heads": num_heads,
        "kv_heads": _num_key_heads(config),
        "head_dim": head_size,
        "vocab": shape.vocab,
        "tied_embeddings": shape.is_tied,
    }
    num_chosen = _first(config, _CHOSEN_EXPERTS)
    if num_chosen is None:
        return numbers | {"ffn": shape.feed_forward}
    try:
        width = _needed(config, _EXPERT_WIDTHS)
        numbers |= {"experts": _needed(config, _EXPERTS), "experts_per_token": num_chosen, "expert_ffn": width}
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    layers = {found[1] for name in _tensors(folder) if (found := _EXPERT_LAYER.search(name))}
    numbers |= {"expert_layers": len(layers)} if layers else {}
    shared = _shared_width(config, width)
    return numbers | ({"shared_ffn": shared} if shared else {})


def _shape(config: Config, whole: Config, tensors: Mapping[str, tuple[int, ...]]) -> ModelShape:
    hidden, num_heads, num_layers = _needed(config, _HIDDEN), _needed(config, _HEADS), _needed(config, _LAYERS)
    head_size = _head_size(config)
    outputs = [prod(shape) for name, shape in tensors.items() if name.endswith(_OUTPUT_LAYERS)]
    is_tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings"))
    if not isinstance(is_tied, bool):
        is_tied = not outputs
    num_params = sum(map(prod, tensors.values()))
    return ModelShape(
        # Some files hold both of the tied tensors.
        num_params=num_params - sum(outputs) if is_tied else num_params,
        num_layers=num_layers,
        hidden=hidden,
        feed_forward=_feed_forward(config, hidden),
        num_feed_forward_copies=_num_feed_forward_copies(config, tensors),
        query_width=num_heads * head_size,
        key_width=_num_key_heads(config) * head_size,
        vocab=_needed(config, ("vocab_size",)),
        is_tied=is_tied,
        num_norms=_num_norms(tensors, hidden, num_layers=num_layers),
        num_norm_copies=_num_norm_copies(config, tensors),
        ends_in_norms=any(name.endswith(_LAST_NORMS) for name in tensors),
        num_passing_widths=_STEPS_MADE.get(_activation(config), 0),
        num_inputs=sum(name.endswith(_INPUTS) and ".experts." not in name for name in tensors) / num_layers or 5.0,
        has_query_norms=any(name.endswith(_QUERY_NORMS) for name in tensors),
        has_fused_queries=any(name.endswith(_FUSED_QUERIES) for name in tensors),
        has_sinks=any(name.endswith("sinks") for name in tensors),
        latent_width=(_first(config, ("q_lora_rank",)) or 0) + (_first(config, ("kv_lora_rank",)) or 0),
        num_dense_layers=_num_dense_layers(config, tensors, num_layers),
        dense_feed_forward=_first(config, ("intermediate_size_mlp", *_FEED_FORWARDS)) or 0,
        window=_window(config),
        num_chosen_experts=_num_chosen_experts(config) or 0,
        expert_params=sum(prod(shape) for name, shape in tensors.items() if _EXPERT_WEIGHTS in name),
    )


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name; each tensor counts once, in whichever files it is."""
    # As `transformers` looks for them: one file, or those that the index names. Folders hold others as well.
    files = [path for path in (folder / "model.safetensors",) if path.is_file()]
    named = read_mapping(folder / INDEX_FILE).get("weight_map")
    if not files and isinstance(named, Mapping):
        names = {name for name in named.values() if isinstance(name, str)}
        files = [path for path in folder.glob("*.safetensors") if path.name in names]
    if not files:
        raise ValueError("holds neither model.safetensors nor the files of an index")
    return {name: shape for path in files for name, shape in safetensors_shapes(path).items()}


def _num_norms(tensors: Mapping[str, tuple[int, ...]], hidden: int, *, num_layers: int) -> float:
    """Of hidden states in a layer; the last one of all belongs to none."""
    norms = (name for name, shape in tensors.items() if shape == (hidden,) and name.endswith(_NORMS))
    num_norms = sum(not name.endswith(_QUERY_NORMS) for name in norms)
    return (num_norms - 1) / num_layers if num_norms > num_layers else 2.0


def _num_key_heads(config: Config) -> int:
    return _first(config, ("num_key_value_heads",)) or _needed(config, _HEADS)


def _head_size(config: Config) -> int:
    """Of queries and keys; with latent attention of both of their parts."""
    parts = [_first(config, (name,)) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    return sum(parts) if all(parts) else _stated_head_size(config)


def _stated_head_size(config: Config) -> int:
    return _first(config, ("head_dim",)) or _needed(config, _HIDDEN) // _needed(config, _HEADS)


def _num_dense_layers(config: Config, tensors: Mapping[str, tuple[int, ...]], num_layers: int) -> int:
    """Of a mixture; none where files name experts in a way that is not known."""
    mixed = {found[1] for name in tensors if (found := _EXPERT_LAYER.search(name))}
    return num_layers - len(mixed) if mixed and _num_chosen_experts(config) is not None else 0


def _window(config: Config) -> int | None:
    """Tokens that some layers read at most, in a window or a chunk."""
    kinds = config.get("layer_types")
    is_used = any(str(kind).startswith(("sliding", "chunked")) for kind in kinds) if isinstance(kinds, list) else True
    return (_first(config, _WINDOWS) or None) if is_used and config.get("use_sliding_window") is not False else None


def _num_norm_copies(config: Config, tensors: Mapping[str, object]) -> int:
    """A norm with a bias is a fused one."""
    usual = 1 if any(name.endswith(_NORM_BIASES) for name in tensors) else 2
    return _NORM_COPIES.get(str(config.get("model_type")), usual)


def _activation(config: Config) -> str:
    return next((value for name in _ACTIVATIONS if isinstance(value := config.get(name), str)), "")


def _text_config(config: Config) -> Config:
    inner = (config.get(name) for name in _TEXT)
    return next((each for each in inner if isinstance(each, Mapping)), config)


def _num_chosen_experts(config: Config) -> int | None:
    """Experts that compute a token; None without experts."""
    names = ("num_local_experts",) if config.get("model_type") in _ALL_EXPERTS_TYPES else _CHOSEN_EXPERTS
    return _first(config, names)


def _feed_forward(config: Config, hidden: int) -> int:
    chosen = _num_chosen_experts(config)
    if chosen is None:
        # GPT-2 states null for the default; its configurations may hold the others' numbers as well, unused.
        names = ("n_inner",) if "n_inner" in config else _FEED_FORWARDS
        return _first(config, names) or 4 * hidden
    width = _first(config, _EXPERT_WIDTHS) or 0
    if config.get("model_type") in _ALL_EXPERTS_TYPES:
        return (chosen + 1) * width
    return chosen * width + _shared_width(config, width)


def _shared_width(config: Config, width: int) -> int:
    """Of what all tokens pass beside experts of this width: stated, or as a number of such experts."""
    stated = _first(config, ("shared_expert_intermediate_size",))
    return width * (_first(config, ("n_shared_experts",)) or 0) if stated is None else stated


def _num_feed_forward_copies(config: Config, tensors: Mapping[str, tuple[int, ...]]) -> int:
    """With a gate both of its factors, the gate before its activation function, and the product; else two."""
    is_gated = _num_chosen_experts(config) is not None or any("gate" in name for name in tensors)
    steps = _STEPS_KEPT.get(_activation(config), _STEPS_KEPT.get(str(config.get("model_type")), 0))
    return (4 if is_gated else 2) + steps


def _needed(config: Config, names: tuple[str, ...]) -> int:
    value = _first(config, names)
    if not value:
        raise ValueError(f"config.json has no {names[0]}")
    return value


def _first(config: Config, names: tuple[str, ...]) -> int | None:
    """The first number that is stated; configurations write 0 or null where something does not apply."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} in config.json must be a positive integer, not {value!r:.100}")
        return value
    return None
