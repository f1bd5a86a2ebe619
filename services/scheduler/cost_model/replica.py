"""Computes the steady state of one generation replica: its concurrent sequences and its speed.

A decode step reads the weights and the cache of the whole batch, or computes, whichever takes longer, plus a fixed
overhead and, with tensor parallelism, two all-reduces per layer. Source: RM-1, "Decode" and "Replica rate", which have
no pipeline stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.scheduler.cost_model.demand import Demand
from services.scheduler.cost_model.layouts import Stage, stages_of, usable_bytes
from services.scheduler.problem.problem import NodeClass, Problem

_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica at a batch size."""

    batch: int
    """Sequences that it has slots for."""
    step_s: float
    """Seconds of one decode step, which adds a token to each sequence."""
    samples_per_second: float
    """Rate while it is not paused."""
    pause_s: float
    """Seconds for which a weight update pauses it."""
    decoding: float
    """Of the batch, sequences that decode: fewer where sessions that wait for an environment take their place."""


class ReplicaModel:
    """Replicas of `tp` x `pp` GPUs of one machine."""

    def __init__(self, problem: Problem, demand: Demand, node: NodeClass, tp: int, pp: int = 1) -> None:
        gpu, constants, model = problem.gpu_types[node.gpu], problem.cost_model, problem.model
        peak = tp * gpu.tflops_bf16 * 1e12
        self._demand = demand
        self._stages = stages_of(model, demand, pp)
        self._read_bytes_per_second = tp * gpu.hbm_GBps * 1e9 * constants.eta_bw
        self._decode_flops_per_second = peak * constants.eta_fl
        self._prefill_flops_per_second = peak * constants.eta_prefill
        # With more GPUs than KV heads, some heads are duplicated.
        self._kv_copies = max(1.0, tp / model.kv_heads)
        self._step_overhead_s = constants.step_overhead_s
        self._layer_overhead_s = constants.layer_overhead_s
        self._sequence_overhead_s = constants.sequence_overhead_s
        self._layer_overhead_s_per_sequence = 0.0
        if tp > 1:
            self._layer_overhead_s += 2 * (gpu.ar_latency_us * 1e-6 + constants.allreduce_overhead_s)
            reduced_bytes = 2.0 * (tp - 1) / tp * model.hidden * 2
            self._layer_overhead_s_per_sequence = 2 * reduced_bytes / (gpu.ar_bus_GBps * 1e9)
        if pp > 1:
            # A stage sends the next one hidden state and residual of each sequence.
            self._step_overhead_s += gpu.ar_latency_us * 1e-6
            self._sequence_overhead_s += 2.0 * model.hidden * 2 / (gpu.ar_bus_GBps * 1e9)
        self._pause_s = constants.sync_pause_s
        self._environment = problem.workload.environment
        self._recomputes = constants.kv_recompute_on_update
        self._measured_samples_per_second = next(
            (
                rate.tokens_per_second / demand.completion_tokens
                for rate in problem.measured_rates
                if rate.role == "generator" and (rate.gpu, rate.tp, rate.pp) == (node.gpu, tp, pp)
            ),
            None,
        )
        resident_bytes = self._kv_copies * demand.kv_resident_bytes / demand.completion_tokens
        offered_bytes = tp * usable_bytes(problem, node)
        fitting = min(
            (offered_bytes - stage.weight_bytes) / (resident_bytes * stage.layer_share) for stage in self._stages
        )
        self.max_batch = min(fitting, float(constants.max_num_seqs))
        """Sequences that fit in memory, not rounded."""

    @property
    def _prefill_share(self) -> float:
        """Of a prefill, that of the stage with most layers, for which the others wait."""
        return max(stage.layer_share for stage in self._stages)

    @property
    def prefill_s(self) -> float:
        """Prefill time of one sample, with nothing else running; a prompt that a group shares counts once."""
        return self._demand.prefill_flops * self._prefill_share / self._prefill_flops_per_second

    @property
    def prefill_token_s(self) -> float:
        """Prefill time per context token that is recomputed."""
        return self._demand.flops_per_token * self._prefill_share / self._prefill_flops_per_second

    def step_s(self, batch: float) -> float:
        """Time in which each of this many sequences with the mean context gets a token.

        Stages work at once, each on its part of the sequences, so that each waits for the slowest as often as there
        are stages. The parts are taken to be equal.
        """
        num_stages = len(self._stages)
        at_once = batch if num_stages == 1 else max(1.0, batch / num_stages)
        return num_stages * max(self._pass_s(stage, at_once) for stage in self._stages)

    def _pass_s(self, stage: Stage, batch: float) -> float:
        demand = self._demand
        read_per_sequence = demand.kv_read_bytes / demand.completion_tokens * stage.layer_share
        unread_bytes = demand.unread_expert_bytes(batch) * stage.layer_share
        read_bytes = stage.weight_bytes - unread_bytes + self._kv_copies * batch * read_per_sequence
        read_s = read_bytes / self._read_bytes_per_second
        flops = batch * (stage.flops_per_token + demand.flops_per_kv_byte * read_per_sequence)
        compute_s = flops / self._decode_flops_per_second
        overhead_s = self._step_overhead_s + stage.num_layers * self._layer_overhead_s
        per_sequence_s = self._sequence_overhead_s + stage.num_layers * self._layer_overhead_s_per_sequence
        return max(read_s, compute_s) + overhead_s + batch * per_sequence_s

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
        demand, decoding = self._demand, self._decoding(batch)
        pause_s = self._pause_s
        if self._recomputes:
            context_tokens = demand.kv_read_bytes / demand.completion_tokens / demand.kv_bytes_per_token
            pause_s += batch * context_tokens * self.prefill_token_s
        return ReplicaState(batch, self.step_s(decoding), self.samples_per_second(decoding), pause_s, decoding)

    def under_way(self, batch: int) -> float:
        """Sequences that decode, and sessions that wait for their environment meanwhile."""
        return batch if self._environment is None or batch < 1 else self._with_waiting(self._decoding(batch))

    def _decoding(self, batch: int) -> float:
        """How many of that many slots decode: a replica has so many sessions, and `max_waiting` more."""
        if self._environment is None:
            return batch
        most = float(batch + self._environment.max_waiting)
        if self._with_waiting(batch) <= most:
            return batch
        lower, upper = 0.0, float(batch)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (lower + upper)
            lower, upper = (middle, upper) if self._with_waiting(middle) <= most else (lower, middle)
        return upper

    def _with_waiting(self, decoding: float) -> float:
        """By Little's law: as many wait as come to wait in the time of a wait."""
        assert self._environment is not None
        return decoding + self.samples_per_second(decoding) * self._environment.wait_s
