"""Computes the times of decode steps and prefills from a GPU's data sheet. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.generator.emulation.hardware import Gpu, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A model under tensor parallelism: the larger of bytes over bandwidth and FLOPs over rate.

        step = max( (weights + KV read) / bandwidth,  (products + attention) / rate ) + overhead + all-reduces

    With tensor parallelism, each layer does two all-reduces of hidden_size elements per sample. The achieved share of
    the data sheet's bandwidth and rate, and the overhead of a step, are fits to published measurements (vLLM and
    TensorRT-LLM on A100, H100, H800: 0.7 to 0.8 of bandwidth, 0.4 to 0.77 of rate). With 2,500 tokens of
    context it is within 7 % of StreamRL's table for a 7B model on an H800, at every batch size.
    """

    gpu: Gpu
    model: ModelShape
    num_gpus: int = 1
    num_stages: int = 1
    """Stages of layers, of equally many GPUs each; they work at once, each on its part of the samples, and read their
    weights once for each part."""
    slowdown: float = 1.0
    bandwidth_share: float = 0.75
    decode_flops_share: float = 0.6
    prefill_flops_share: float = 0.65
    overhead_s: float = 0.002
    memory_share: float = 0.9
    """Share of the GPU memory that the engine may use."""
    reserved_bytes: float = 2e9
    """Memory of each GPU reserved for activations and the runtime."""

    def __post_init__(self) -> None:
        """Refuses a model that does not fit."""
        if self.kv_capacity_tokens < 1:
            needed, offered = self.model.weight_bytes / 1e9, self._usable_bytes / 1e9
            raise ValueError(f"the model's {needed:.0f} GB of weights leave no KV room in {offered:.0f} GB; add GPUs")

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV cache fits beside the weights."""
        return int((self._usable_bytes - self.model.weight_bytes) / self._kv_token_bytes)

    def step_s(self, num_samples: int, kv_tokens: float) -> float:
        """See `StepTimes`."""
        gpu, model = self.gpu, self.model
        read_bytes = self.num_stages * model.weight_bytes + kv_tokens * self._kv_token_bytes
        memory_s = read_bytes / (self.num_gpus * gpu.memory_bytes_per_second * self.bandwidth_share)
        flops = num_samples * model.flops_per_token + kv_tokens * model.attention_flops_per_kv_token
        compute_s = flops / (self.num_gpus * gpu.flops_per_second * self.decode_flops_share)
        exchanged_s = self._all_reduce_s(num_samples) + self._hops_s(num_samples)
        return self.slowdown * (max(memory_s, compute_s) + self.num_stages * self.overhead_s + exchanged_s)

    def prefill_s(self, num_tokens: int) -> float:
        """See `StepTimes`; causal attention covers half of the square."""
        model = self.model
        flops = num_tokens * (model.flops_per_token + num_tokens * model.attention_flops_per_kv_token / 2)
        return self.slowdown * flops / (self.num_gpus * self.gpu.flops_per_second * self.prefill_flops_share)

    @property
    def _usable_bytes(self) -> float:
        return self.num_gpus * (self.memory_share * self.gpu.memory_bytes - self.reserved_bytes)

    @property
    def _kv_token_bytes(self) -> float:
        """KV bytes per token over all GPUs; GPUs of a stage in excess of the KV heads hold copies."""
        return self.model.kv_token_bytes * max(1.0, self._num_workers / self.model.num_kv_heads)

    @property
    def _num_workers(self) -> int:
        """GPUs of a stage."""
        return self.num_gpus // self.num_stages

    def _all_reduce_s(self, num_samples: int) -> float:
        if self._num_workers == 1:
            return 0.0
        at_once = num_samples / self.num_stages
        sent_bytes = 2 * (1 - 1 / self._num_workers) * at_once * self.model.hidden_size * self.model.element_bytes
        once_s = self.gpu.link_latency_s + sent_bytes / self.gpu.link_bytes_per_second
        return 2 * self.model.num_layers * once_s

    def _hops_s(self, num_samples: int) -> float:
        """Hidden states and residuals from stage to stage."""
        if self.num_stages == 1:
            return 0.0
        sent_bytes = 2 * num_samples * self.model.hidden_size * self.model.element_bytes
        return self.num_stages * self.gpu.link_latency_s + sent_bytes / self.gpu.link_bytes_per_second
