"""Describes emulated GPUs and the models that they would run.

Sources: vendors' data sheets for rates and memory (dense bf16; T4 and V100 fp16); all-reduce rates of A100 and H100 as
Vidur measured them, those of others scaled from these or assumed; shapes from the models' own config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator."""

    flops_per_second: float
    """Dense compute rate in the models' element type."""
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """All-reduce bandwidth of each GPU when several of a machine take part."""
    link_latency_s: float = 10e-6
    """Latency of an all-reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with grouped-query attention."""

    num_parameters: float
    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    vocab_size: int
    head_size: int = 128
    has_tied_embedding: bool = False
    element_bytes: int = 2

    @property
    def weight_bytes(self) -> float:
        """Size of all weights."""
        return self.num_parameters * self.element_bytes

    @property
    def kv_token_bytes(self) -> float:
        """KV cache size of one token: keys and values of every layer."""
        return 2.0 * self.num_layers * self.num_kv_heads * self.head_size * self.element_bytes

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token of the matrix products, without attention; an embedding lookup counts as free."""
        looked_up = 0 if self.has_tied_embedding else self.vocab_size * self.hidden_size
        return 2.0 * (self.num_parameters - looked_up)

    @property
    def attention_flops_per_kv_token(self) -> float:
        """FLOPs of one query over one token of context in all layers: scores and weighted values."""
        return 4.0 * self.num_layers * self.num_query_heads * self.head_size


def _gpu(tera_flops: float, gigabytes: float, gigabytes_per_second: float, link: float, latency_us: float = 10) -> Gpu:
    return Gpu(
        flops_per_second=tera_flops * 1e12,
        memory_bytes=gigabytes * 1e9,
        memory_bytes_per_second=gigabytes_per_second * 1e9,
        link_bytes_per_second=link * 1e9,
        link_latency_s=latency_us * 1e-6,
    )


GPUS = {
    "B200": _gpu(2250, 180, 8000, 700),
    "H200": _gpu(989.5, 141, 4800, 340),
    "H100": _gpu(989.5, 80, 3350, 340),
    "H800": _gpu(989.5, 80, 3350, 150),
    "H20": _gpu(148, 96, 4000, 340),
    "A800": _gpu(312, 80, 2039, 100),
    "A100-80": _gpu(312, 80, 2039, 155),
    "A100-40": _gpu(312, 40, 1555, 155),
    "MI300X": _gpu(1307, 192, 5300, 250),
    "L40S": _gpu(362, 48, 864, 20, 25),
    "L40": _gpu(181, 48, 864, 20, 25),
    "L4": _gpu(121, 24, 300, 12, 25),
    "A10G": _gpu(70, 24, 600, 12, 25),
    "A6000": _gpu(154.8, 48, 768, 40, 25),
    "RTX4090": _gpu(165.2, 24, 1008, 10, 25),
    "RTX3090": _gpu(71, 24, 936, 10, 25),
    "V100-32": _gpu(125, 32, 900, 100),
    "T4": _gpu(65, 16, 320, 8, 25),
}


def _qwen(parameters: float, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int = 152_064) -> ModelShape:
    return ModelShape(
        num_parameters=parameters,
        num_layers=layers,
        hidden_size=hidden,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=vocab,
    )


MODELS = {
    "qwen2.5-1.5b": replace(_qwen(1.544e9, 28, 1536, 12, 2, 151_936), has_tied_embedding=True),
    "qwen2.5-7b": _qwen(7.616e9, 28, 3584, 28, 4),
    "qwen2.5-32b": _qwen(32.76e9, 64, 5120, 40, 8),
    "qwen2.5-72b": _qwen(72.7e9, 80, 8192, 64, 8),
}
