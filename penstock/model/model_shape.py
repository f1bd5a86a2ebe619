"""Reads a model's shape from its folder: config.json and the headers of its safetensors files. Light: no transformers.

Configurations name the same number differently; the names known here are those of the families that are trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

from penstock.model.digests import safetensors_shapes
from penstock.model.model_folder import read_mapping
from penstock.model.training_memory import ModelShape
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
_STEPS_KEPT = {"gelu_new": 3, "xielu": 3}
"""Activation functions of several steps: tensors that these keep for their gradients beside input and result."""
_EXPERT_WEIGHTS = ".experts."
_NORMS = ("norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
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
    num_heads = _needed(config, _HEADS)
    head_size = shape.query_width // num_heads
    numbers: dict[str, float] = {
        "params": shape.num_params,
        "layers": shape.num_layers,
        "hidden": shape.hidden,
        "q_heads": num_heads,
        "kv_heads": shape.key_width // head_size,
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
    hidden, num_heads = _needed(config, _HIDDEN), _needed(config, _HEADS)
    head_size = _first(config, ("head_dim",)) or hidden // num_heads
    outputs = [prod(shape) for name, shape in tensors.items() if name.endswith(_OUTPUT_LAYERS)]
    is_tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings"))
    if not isinstance(is_tied, bool):
        is_tied = not outputs
    num_params = sum(map(prod, tensors.values()))
    return ModelShape(
        # Some files hold both of the tied tensors.
        num_params=num_params - sum(outputs) if is_tied else num_params,
        num_layers=_needed(config, _LAYERS),
        hidden=hidden,
        feed_forward=_feed_forward(config, hidden),
        num_feed_forward_copies=_num_feed_forward_copies(config, tensors),
        query_width=num_heads * head_size,
        key_width=(_first(config, ("num_key_value_heads",)) or num_heads) * head_size,
        vocab=_needed(config, ("vocab_size",)),
        is_tied=is_tied,
        num_norms=_num_norms(tensors, hidden, num_layers=_needed(config, _LAYERS)),
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
    num_norms = sum(shape == (hidden,) and name.endswith(_NORMS) for name, shape in tensors.items())
    return (num_norms - 1) / num_layers if num_norms > num_layers else 2.0


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
    function = next((value for name in _ACTIVATIONS if isinstance(value := config.get(name), str)), "")
    is_gated = _num_chosen_experts(config) is not None or any("gate" in name for name in tensors)
    return (4 if is_gated else 2) + _STEPS_KEPT.get(function, 0)


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
