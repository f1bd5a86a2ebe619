"""Defines the constants of the cost model, whose defaults are RM-1's."""

# ruff: noqa: N815 - keys carry units as written.

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from penstock.config import StrictModel
from services.scheduler.problem.quantities import Count, NotNegative, Positive, Share, with_default

_MFU_TRAIN = {
    "default": 0.40,
    "H200": 0.42,
    "H100": 0.42,
    "H800": 0.43,
    "H20": 0.33,
    "A100-80": 0.55,
    "A100-40": 0.50,
    "L40S": 0.33,
    "L4": 0.35,
    "RTX4090": 0.45,
}
_MFU_INFER = {"default": 0.45, "H20": 0.40, "L4": 0.40}


class CostConstants(StrictModel):
    """Constants of the cost model; the defaults are RM-1's. Terms that RM-1 lacks are off by default."""

    eta_bw: Share = 0.75
    """Share of the memory bandwidth that decoding achieves."""
    eta_fl: Share = 0.60
    """Share of the arithmetic peak that decoding achieves."""
    eta_prefill: Share = 0.65
    mfu_train: Share | dict[str, Share] = _MFU_TRAIN
    """Share of the peak in training: one for all GPUs, or by GPU type with `default`."""
    mfu_infer: Share | dict[str, Share] = _MFU_INFER
    """Share of the peak in forward passes other than generation."""
    step_overhead_s: NotNegative = 0.002
    """Fixed time of each decode step."""
    layer_overhead_s: NotNegative = 0.0
    """Fixed time of each layer in a decode step: kernel start and end."""
    allreduce_overhead_s: NotNegative = 0.0
    """Time of each all-reduce in a decode step, two per layer, beyond its latency: launches, waiting for the last
    GPU."""
    sequence_overhead_s: NotNegative = 0.0
    """Time per sequence in a decode step: sampling, bookkeeping."""
    attention_efficiency: Share = 1.0
    """Rate of attention over the rate of matrix products, outside generation."""
    mem_util: Share = 0.9
    reserve_GB: NotNegative = 2.0
    """Memory of each GPU for everything but weights and cache."""
    max_num_seqs: Count = 1024
    """Maximum sequences that a replica decodes concurrently."""
    prefix_sharing: bool = True
    """Prefill and keep the prompt of a group once."""
    sync_pause_s: NotNegative = 1.0
    """Seconds for which a weight update pauses a replica."""
    kv_recompute_on_update: bool = False
    """An update drops the cache, which is then computed again."""
    dp_overlap: float = Field(default=0.8, ge=0, le=1)
    """Share of a step's computation that can hide its all-reduce."""
    train_overhead_s: NotNegative = 0.0
    """Fixed time of each training step."""
    train_bytes_per_param: Positive = 16.0
    train_pack_tokens: int = Field(default=0, ge=0, le=100_000_000)
    """Tokens of a trainer's forward pass. Memory and traffic are then those of Penstock's trainer: even shards over
    all GPUs of the pool, gathered weights and activations besides, gathers for every pass. 0: RM-1's rules."""
    host_link_GBps: Positive = 20.0
    """Between a GPU and its machine's memory, each way, where a mesh offloads. Assumed unless measured: of PCIe 4.0
    x16's 32 GB/s."""
    host_memory_GBps: Positive = 100.0
    """Of a machine's memory, as its processors read and write it in AdamW's step where a mesh offloads. Assumed
    unless measured."""

    @field_validator("mfu_train", "mfu_infer")
    @classmethod
    def _there_is_a_default(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        return with_default(value)

    def mfu(self, gpu: str, kind: Literal["train", "infer"]) -> float:
        """Share of its peak that a GPU type reaches in a task of this kind."""
        value = self.mfu_train if kind == "train" else self.mfu_infer
        return value.get(gpu, value["default"]) if isinstance(value, dict) else value
