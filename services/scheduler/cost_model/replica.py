"""Computes the steady state of one generation replica: its concurrent sequences and its speed.

A decode step reads the weights and the cache of the whole batch, or computes, whichever takes longer, plus a fixed
overhead and, with tensor parallelism, two all-reduces per layer. Source: RM-1, "Decode" and "Replica rate".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.scheduler.cost_model.demand import Demand
from services.scheduler.problem.problem import NodeClass, Problem

MAX_TENSOR_PARALLEL = 16
_WEIGHTS_HEADROOM = 1.02
"""With less than 2 % of headroom beside the weights there is no useful cache."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica at a batch size."""

    batch: int
    """Sequences decoded concurrently."""
    step_s: float
    """Seconds of one decode step, which adds a token to each sequence."""
    samples_per_second: float
    """Rate while it is not paused."""
    pause_s: float
    """Seconds for which a weight update pauses it."""


class ReplicaModel:
    """Replicas of `tp` GPUs of one machine."""

    def __init__(self, problem: Problem, demand: Demand, node: NodeClass, tp: int) -> None:
        gpu, constants, model = problem.gpu_types[node.gpu], problem.cost_model, problem.model
        peak = tp * gpu.tflops_bf16 * 1e12
        self._demand = demand
        self._read_bytes_per_second = tp * gpu.hbm_GBps * 1e9 * constants.eta_bw
        self._decode_flops_per_second = peak * constants.eta_fl
        self._prefill_flops_per_second = peak * constants.eta_prefill
        # With more GPUs than KV heads, some heads are duplicated.
        self._kv_copies = max(1.0, tp / model.kv_heads)
        self._step_overhead_s = constants.step_overhead_s + model.layers * constants.layer_overhead_s
        self._overhead_s_per_sequence = constants.sequence_overhead_s
        if tp > 1:
            self._step_overhead_s += 2 * model.layers * (gpu.ar_latency_us * 1e-6 + constants.allreduce_overhead_s)
            reduced_bytes = 2.0 * (tp - 1) / tp * model.hidden * 2
            self._overhead_s_per_sequence += 2 * model.layers * reduced_bytes / (gpu.ar_bus_GBps * 1e9)
        self._pause_s = constants.sync_pause_s
        self._recomputes = constants.kv_recompute_on_update
        self._measured_samples_per_second = next(
            (
                rate.tokens_per_second / demand.completion_tokens
                for rate in problem.measured_rates
                if rate.role == "generator" and (rate.gpu, rate.tp) == (node.gpu, tp)
            ),
            None,
        )
        free_bytes = tp * usable_bytes(problem, node) - demand.weight_bytes
        resident_bytes = self._kv_copies * demand.kv_resident_bytes / demand.completion_tokens
        self.max_batch = min(free_bytes / resident_bytes, float(constants.max_num_seqs))
        """Sequences that fit in memory, not rounded."""

    @property
    def prefill_s(self) -> float:
        """Prefill time of one sample, with nothing else running; a prompt that a group shares counts once."""
        return self._demand.prefill_flops / self._prefill_flops_per_second

    @property
    def prefill_token_s(self) -> float:
        """Prefill time per context token that is recomputed."""
        return self._demand.flops_per_token / self._prefill_flops_per_second

    def step_s(self, batch: float) -> float:
        """Time of one decode step of this many sequences with the mean context."""
        demand = self._demand
        read_per_sequence = demand.kv_read_bytes / demand.completion_tokens
        read_bytes = demand.read_weight_bytes(batch) + self._kv_copies * batch * read_per_sequence
        read_s = read_bytes / self._read_bytes_per_second
        flops = batch * (demand.flops_per_token + demand.flops_per_kv_byte * read_per_sequence)
        compute_s = flops / self._decode_flops_per_second
        return max(read_s, compute_s) + self._step_overhead_s + batch * self._overhead_s_per_sequence

    def samples_per_second(self, batch: float) -> float:
        """Rate with this many sequences, while it is not paused."""
        if self._measured_samples_per_second is not None:
            return self._measured_samples_per_second * batch / math.floor(self.max_batch)
        return 1 / (self._demand.completion_tokens * self.step_s(batch) / batch + self.prefill_s)

    def token_s(self, batch: float) -> float:
        """Time from one token of a sequence to its next, with the prefill of others in between."""
        return batch / (self._demand.completion_tokens * self.samples_per_second(batch))

    def batch(self, share: float = 1.0) -> int:
        """Sequences decoded concurrently at this share of its largest batch."""
        return math.floor(self.max_batch * share)

    def at(self, batch: int) -> ReplicaState | None:
        """The replica with this many sequences; None below one."""
        if batch < 1:
            return None
        demand = self._demand
        pause_s = self._pause_s
        if self._recomputes:
            context_tokens = demand.kv_read_bytes / demand.completion_tokens / demand.kv_bytes_per_token
            pause_s += batch * context_tokens * self.prefill_token_s
        return ReplicaState(batch, self.step_s(batch), self.samples_per_second(batch), pause_s)


def usable_bytes(problem: Problem, node: NodeClass) -> float:
    """Memory of one GPU available to weights, cache and training state."""
    constants = problem.cost_model
    return (problem.gpu_types[node.gpu].hbm_GB * constants.mem_util - constants.reserve_GB) * 1e9


def tensor_parallel_degrees(problem: Problem, demand: Demand, node: NodeClass) -> tuple[int, ...]:
    """Possible degrees of replicas: powers of two that divide the machine and the query heads and fit the model."""
    most = min(node.gpus, problem.constraints.max_tp, MAX_TENSOR_PARALLEL)
    return tuple(
        tp
        for tp in (1, 2, 4, 8, 16)
        if tp <= most
        and node.gpus % tp == 0
        and problem.model.q_heads % tp == 0
        and tp * usable_bytes(problem, node) > demand.weight_bytes * _WEIGHTS_HEADROOM
    )
