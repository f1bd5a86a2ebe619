"""Divides a generation replica over GPUs of one machine: tensor-parallel workers in pipeline stages, as vLLM does."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.cost_model.demand import Demand
from services.scheduler.problem.model import Model
from services.scheduler.problem.plan_document import Layout
from services.scheduler.problem.problem import NodeClass, Problem

MAX_TENSOR_PARALLEL = 16
_WEIGHTS_HEADROOM = 1.02
"""With less than 2 % of headroom beside the weights there is no useful cache."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage holds and computes of the model."""

    num_layers: int
    layer_share: float
    """Of the model's layers, and so of its cache."""
    weight_bytes: float
    flops_per_token: float


def stages_of(model: Model, demand: Demand, num_stages: int) -> tuple[Stage, ...]:
    """The stages of a replica, as vLLM divides layers: evenly, with what is left over before the last stage.

    The first stage holds the embedding, the last one the output layer, of which a tied model has a copy there. Source:
    vLLM's `get_pp_indices`.
    """
    if num_stages == 1:
        return (Stage(model.layers, 1.0, demand.weight_bytes, demand.flops_per_token),)
    embedding = model.vocab * model.hidden
    per_layer = (model.params - embedding * (1 if model.tied_embeddings else 2)) / model.layers
    even, left = divmod(model.layers, num_stages)
    layer_flops = (demand.flops_per_token - 2.0 * embedding) / model.layers
    found = []
    for index in range(num_stages):
        num_layers = even + (1 if num_stages - 1 - left <= index < num_stages - 1 else 0)
        is_last = index == num_stages - 1
        params = num_layers * per_layer + (embedding if index == 0 or is_last else 0)
        flops = num_layers * layer_flops + (2.0 * embedding if is_last else 0.0)
        found.append(Stage(num_layers, num_layers / model.layers, params * model.weight_bytes, flops))
    return tuple(found)


def layouts(problem: Problem, demand: Demand, node: NodeClass) -> tuple[Layout, ...]:
    """The layouts of replicas on a machine, by their GPUs, which divide the machine's; those with fewer stages first.

    Tensor-parallel degrees are powers of two that divide the machine and the query heads; stages are at most
    `constraints.gen_pp`, and no more than layers. Weights of the largest stage must fit beside a cache.
    """
    most = min(node.gpus, problem.constraints.max_tp, MAX_TENSOR_PARALLEL)
    degrees = [tp for tp in (1, 2, 4, 8, 16) if tp <= most and node.gpus % tp == 0 and problem.model.q_heads % tp == 0]
    num_stages = range(1, min(node.gpus, problem.constraints.gen_pp, problem.model.layers) + 1)
    found = [Layout(tp, pp) for pp in num_stages for tp in degrees if node.gpus % (tp * pp) == 0]
    fitting = [each for each in found if _fits(problem, demand, node, each)]
    return tuple(sorted(fitting, key=lambda layout: (layout.gpus, layout.pp)))


def _fits(problem: Problem, demand: Demand, node: NodeClass, layout: Layout) -> bool:
    largest = max(stage.weight_bytes for stage in stages_of(problem.model, demand, layout.pp))
    return layout.tp * usable_bytes(problem, node) > largest * _WEIGHTS_HEADROOM


def usable_bytes(problem: Problem, node: NodeClass) -> float:
    """Memory of one GPU available to weights, cache and training state."""
    constants = problem.cost_model
    return (problem.gpu_types[node.gpu].hbm_GB * constants.mem_util - constants.reserve_GB) * 1e9
