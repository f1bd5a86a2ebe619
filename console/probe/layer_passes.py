"""Measures passes of a model's layers on one device, as scorers, trainers and critics make them; of a child process.

The layers have the model's widths and random weights: how fast they are does not depend on what they hold. They compute
in the type that Penstock's trainer takes by default: bfloat16 on GPUs, float32 on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, Qwen2Config

_NUM_LAYERS = 2
_VOCAB = 32
"""Of an embedding that nothing uses."""
_TOKENS = {"cpu": 512, "cuda": 4096}
"""Of a pass, all of one sample."""
_TYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
_MADE = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4},
    "cuda": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8},
}
"""Widths where no model is given: those of a small one, and of one with 7B parameters."""
_PRODUCTS = ("aten.mm", "aten.addmm")
"""Of linear layers. PyTorch counts attention on some devices only, and what is behind the diagonal as well."""


def layer_passes(
    device: torch.device, folder: str | None, seconds_each: Callable[[Callable[[], object]], float]
) -> Iterator[dict[str, float]]:
    """Rate of a forward pass, then of a forward and backward pass, 10^12 FLOP/s by the cost model's count.

    Args:
        device: Where.
        folder: The model's, of which only config.json is read; None for widths by the kind of device.
        seconds_each: Measures the mean time of some work.

    Raises:
        OSError, ValueError: transformers does not know such a model, or it has experts.
    """
    model = _layers(device, folder)
    inputs = torch.randn(1, _TOKENS[device.type], model.config.hidden_size, device=device, dtype=_TYPES[device.type])

    def forward() -> Any:
        return model(inputs_embeds=inputs, use_cache=False).last_hidden_state

    def forward_backward() -> None:
        forward().sum().backward()

    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            forward()
        counted = counter.get_flop_counts()["Global"].items()
        flops = sum(count for operation, count in counted if str(operation) in _PRODUCTS)
        flops += 2.0 * _NUM_LAYERS * _query_width(model.config) * inputs.shape[1] ** 2
        yield {"forward_tflops": flops / seconds_each(forward) / 1e12}
    yield {"forward_backward_tflops": 3 * flops / seconds_each(forward_backward) / 1e12}


def _query_width(config: PreTrainedConfig) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_attention_heads) * head_dim


def _layers(device: torch.device, folder: str | None) -> PreTrainedModel:
    config: PreTrainedConfig = Qwen2Config(**_MADE[device.type])
    if folder is not None:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = _NUM_LAYERS, _VOCAB, None
    if (kinds := getattr(config, "layer_types", None)) is not None:
        config.layer_types = kinds[:_NUM_LAYERS]
    model: PreTrainedModel = AutoModel.from_config(config, dtype=_TYPES[device.type]).to(device)
    if any("expert" in name for name, _ in model.named_parameters()):
        raise ValueError("a mixture of experts, whose operations are not counted")
    return model
