"""Mixtures of experts in a problem: what they hold, what a token computes, and what a decode step reads."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from penstock.model.training_memory import TrainingMode, working_bytes
from services.scheduler.cost_model.demand import Demand, demand_of
from services.scheduler.cost_model.pool_memory import model_shape
from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.cost_model.replica import ReplicaModel
from services.scheduler.problem.plan_check import violations
from tests.helpers.plans.problems import plan, problem

QWEN3_30B = (
    "model={params: 30.53e9, layers: 48, hidden: 2048, q_heads: 32, kv_heads: 4, head_dim: 128, vocab: 151936, "
    "experts: 128, experts_per_token: 8, expert_ffn: 768}"
)
"""Qwen3-30B-A3B: 3.3B of its parameters are active, of which 0.3B are the embedding."""
AS_DENSE = QWEN3_30B.replace("experts: 128, experts_per_token: 8, expert_ffn: 768", "ffn: 6144")
ACTIVE = 30.53e9 - 48 * 120 * 3 * 2048 * 768


def test_a_token_multiplies_the_parameters_that_are_active() -> None:
    mixture, dense = demand_of(problem("tiny_04", QWEN3_30B)), demand_of(problem("tiny_04", AS_DENSE))
    assert pytest.approx(3.3e9, rel=0.02) == ACTIVE
    assert mixture.flops_per_token == pytest.approx(2 * (ACTIVE - 151_936 * 2048))
    assert mixture.task_flops[0][1] < dense.task_flops[0][1] / 4
    half = demand_of(problem("tiny_04", QWEN3_30B.replace("experts: 128", "expert_layers: 24, experts: 128")))
    assert half.expert_bytes == mixture.expert_bytes / 2
    # All of them are held, published and trained.
    held = ("weight_bytes", "training_state_bytes", "gradient_bytes", "kv_bytes_per_token")
    assert [getattr(mixture, name) for name in held] == [getattr(dense, name) for name in held]


def test_a_decode_step_reads_the_experts_that_its_tokens_are_sent_to() -> None:
    stated = problem("tiny_04", QWEN3_30B)
    mixture, dense = demand_of(stated), demand_of(problem("tiny_04", AS_DENSE))

    def read(demand: Demand, batch: int) -> float:
        return demand.weight_bytes - demand.unread_expert_bytes(batch)

    assert read(mixture, 1) == pytest.approx(2 * ACTIVE)
    # Of 128 experts, two tokens are sent to 8 + 8 * 120 / 128 on average.
    two = 2 * (ACTIVE + 48 * 3 * 2048 * 768 * 8 * 120 / 128)
    assert read(mixture, 2) == pytest.approx(two)
    assert read(mixture, 1000) == pytest.approx(read(dense, 1000)) == dense.weight_bytes
    rates = [ReplicaModel(stated, mixture, stated.nodes[0], 8).samples_per_second(batch) for batch in range(1, 200)]
    assert rates == sorted(rates)


def test_passes_need_the_memory_of_what_a_token_passes() -> None:
    packs = ("cost_model.train_pack_tokens=8192",)
    mixture = model_shape(problem("tiny_04", QWEN3_30B, *packs))
    assert (mixture.feed_forward, mixture.num_chosen_experts) == (8 * 768, 8)
    mode = TrainingMode(num_shards=2, pack_tokens=8192, is_half=True)
    assert working_bytes(mixture, mode) > working_bytes(model_shape(problem("tiny_04", AS_DENSE, *packs)), mode)
    shared = problem("tiny_04", QWEN3_30B.replace("768}", "768, shared_ffn: 100}"), *packs)
    assert model_shape(shared).feed_forward == 8 * 768 + 100


def test_the_validator_charges_the_same_as_the_cost_model() -> None:
    """On more and more GPUs, of which the first numbers do not suffice."""
    nodes = "nodes=[{name: h200, gpu: H200, gpus: 8, count: 4, region: r0}]"
    gpus = "gpu_types.H200={tflops_bf16: 989, hbm_GB: 141, hbm_GBps: 4800, ar_bus_GBps: 340, ar_latency_us: 10}"
    stated = problem("tiny_04", QWEN3_30B, nodes, gpus, "links=[]", "cost_model.train_pack_tokens=8192")
    model = CostModel(stated)
    found = []
    for last in range(1, 9):
        tried = plan([("h200-3", 1, 8)], [("h200-0", last)])
        found.append(isinstance(model.score(tried), Score))
        assert found[-1] != any("needs" in line for line in violations(stated, tried))
    assert found == sorted(found)
    assert not found[0]
    assert found[-1]
    assert isinstance(model.score(plan([("h200-3", 1, 8)], [("h200-0", 1)])), Infeasible)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("experts: 128, ", ""), "experts_per_token: only for a mixture; state experts as well"),
        (("experts: 128", "expert_layers: 49, experts: 128"), "expert_layers: 49; at most the 48 layers"),
        (("expert_ffn: 768", "ffn: 768"), "expert_ffn: a mixture of 128 experts needs it"),
        (("experts_per_token: 8", "experts_per_token: 129"), "experts_per_token: 129; at most the 128 experts"),
        (("expert_ffn: 768", "expert_ffn: 1024"), "params: .* must be more than embeddings and the .* of all experts"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_by_name(change: tuple[str, str], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        problem("tiny_04", QWEN3_30B.replace(*change))
