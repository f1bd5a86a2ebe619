"""Computes a sample's cost in bytes read, operations and memory, from model and workload alone, whatever the plan.

Source: RM-1 and the conservation laws under its bounds; docs/planning.md gives the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.scheduler.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class Demand:
    """Expectations over prompt and completion lengths, per sample unless stated otherwise."""

    samples_per_step: float
    weight_bytes: float
    """Bytes of one copy of the weights."""
    expert_bytes: float
    """Those of them that are experts of a mixture."""
    expert_share: float
    """Of a layer's experts, those that a token is sent to."""
    completion_tokens: float
    trained_tokens: float
    """Tokens of prompt and completion."""
    longest_completion_tokens: float
    kv_bytes_per_token: float
    kv_read_bytes: float
    """Keys and values read, summed over the decode steps of a sample."""
    kv_resident_bytes: float
    """Keys and values kept, summed over the decode steps of a sample; a shared prompt counts once per group."""
    flops_per_token: float
    """FLOPs of a forward pass, without attention over the context."""
    flops_per_kv_byte: float
    """FLOPs of attention, per byte of keys and values read."""
    prefill_flops: float
    task_flops: tuple[tuple[Literal["train", "infer"], float], ...]
    """Work other than generation: kind and FLOPs per sample, as matrix products that take equally long."""
    scored_flops: float
    """FLOPs per sample of the task that scorers compute, likewise; 0 without one."""
    gradient_bytes: float
    """Bytes that a step's all-reduce sums."""
    training_state_bytes: float
    """Weights, gradients and optimiser state of everything that the training pool stores."""

    def unread_expert_bytes(self, batch: float) -> float:
        """Bytes of experts that no token of a decode step of this many sequences is sent to.

        Tokens are sent to experts independently and evenly, so that an expert stays unread with probability
        (1 - share) ** batch.
        """
        unread_share: float = (1 - self.expert_share) ** batch
        return self.expert_bytes * unread_share


def demand_of(problem: Problem) -> Demand:
    """The demand of the problem's model and workload."""
    model, workload, constants = problem.model, problem.workload, problem.cost_model
    mean, mean_square = workload.output_len.moments()
    prompt = workload.prompt_len
    prompt_sharers = workload.group_size if constants.prefix_sharing else 1
    # The input embedding is looked up, not multiplied; where it is tied, the output embedding is still multiplied.
    matmul_params = model.params - (0 if model.tied_embeddings else model.vocab * model.hidden)
    # A token multiplies the experts that it is sent to.
    matmul_params -= model.expert_params * (1 - model.expert_share)
    attention = 2.0 * model.layers * model.q_heads * model.head_dim
    kv_bytes = 2.0 * model.layers * model.kv_heads * model.head_dim * model.kv_bytes
    prompt_kv = kv_bytes * prompt * mean
    own_kv = kv_bytes * (mean_square + mean) / 2
    total_square = prompt**2 + 2 * prompt * mean + mean_square
    attended = attention * total_square / constants.attention_efficiency
    forward = 2.0 * matmul_params * (prompt + mean) + attended
    state = sum(
        (constants.train_bytes_per_param if task.kind == "train" else 2.0) * model.params * task.scale
        for task in workload.pool_tasks
        if not task.shares_weights
    )
    return Demand(
        samples_per_step=float(workload.prompts_per_step * workload.group_size),
        weight_bytes=model.params * model.weight_bytes,
        expert_bytes=model.expert_params * model.weight_bytes,
        expert_share=model.expert_share,
        completion_tokens=mean,
        trained_tokens=prompt + mean,
        longest_completion_tokens=workload.output_len.longest,
        kv_bytes_per_token=kv_bytes,
        kv_read_bytes=prompt_kv + own_kv,
        kv_resident_bytes=prompt_kv / prompt_sharers + own_kv,
        flops_per_token=2.0 * matmul_params,
        flops_per_kv_byte=2 * attention / kv_bytes,
        prefill_flops=(2.0 * matmul_params * prompt + attention * prompt**2) / prompt_sharers,
        task_flops=tuple(
            (task.kind, forward * task.scale * task.epochs * (3 if task.kind == "train" else 1))
            for task in workload.pool_tasks
        ),
        scored_flops=0.0 if (scored := workload.scored_task) is None else forward * scored.scale * scored.epochs,
        gradient_bytes=2.0 * model.params,
        training_state_bytes=state,
    )
