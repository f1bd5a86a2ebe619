"""Lists published measurements of decoding and whole runs, and computes the cost model's value for each.

Values that a source does not print (context lengths, batch sizes, allocations) are marked as assumed in the row's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.scheduler.problems.settings import (
    GPUS,
    MODELS,
    Document,
    areal,
    lognormal,
    machines,
    make_problem,
    streamrl,
    streamrl_lengths,
)
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.layouts import layouts
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.cost_model.replica import ReplicaModel
from services.scheduler.problem.cost_constants import CostConstants
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem

STREAMRL_STEPS_MS = {
    1: 8.3,
    2: 8.7,
    4: 8.9,
    8: 9.0,
    16: 9.4,
    32: 10.2,
    64: 11.6,
    128: 15.2,
    256: 21.8,
    512: 36.9,
}
"""StreamRL, Figure 6, read from the plot: a decode step by batch size."""
_FIGURE_6_CONTEXT = 1500
"""Assumed; the figure does not state it. With much more, 512 sequences of a 7B model would not fit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, as a rate."""

    name: str
    measured: float
    predict: Callable[[CostConstants], float]


def decode_rows() -> list[Row]:
    """Rows that the decode constants are fitted to, tokens per second."""
    curve = [
        Row(f"StreamRL Fig. 6, 7B, H800, batch {batch}", batch / ms * 1e3, _step("qwen2.5-7b", "H800", batch))
        for batch, ms in STREAMRL_STEPS_MS.items()
    ]
    gemm = "Vidur GEMMs, 7B, weights only"
    return [
        *curve,
        Row("TensorRT-LLM 0.6.1, 7B, A100, batch 384, 128/128", 5586, _static("llama-7b", "A100-80", 384, 128, 128)),
        Row("the same, batch 60, 128/2048", 1928, _static("llama-7b", "A100-80", 60, 128, 2048)),
        Row("the same, batch 52, 2048/128", 591, _static("llama-7b", "A100-80", 52, 2048, 128)),
        Row("the same, GPT-J 6B, batch 512, 128/128", 6374, _static("gpt-j-6b", "A100-80", 512, 128, 128)),
        Row("the same, GPT-J 6B, batch 60, 2048/128", 670, _static("gpt-j-6b", "A100-80", 60, 2048, 128)),
        Row("vLLM, 7B, A40, 50 requests, 100/514", 1094, _static("qwen2.5-7b", "A40", 50, 100, 514)),
        Row("vLLM, 7B, RTX 4090, 300 requests, 100/600", 3580, _burst("qwen2.5-7b", "RTX4090", 300, 100, 600)),
        Row(f"{gemm}, A100, TP1", *_weights("llama-7b", "A100-80", 1, 0.75)),
        Row(f"{gemm}, H100, TP1", *_weights("llama-7b", "H100", 1, 0.75)),
        Row(f"{gemm}, A100, TP8", *_weights("llama-7b", "A100-80", 8, 0.455)),
        Row(f"{gemm}, H100, TP8", *_weights("llama-7b", "H100", 8, 0.46)),
        Row("AReaL, 1.5B, H800, 24 GPUs generate (assumed)", 9600, _steady("qwen2.5-1.5b")),
        Row("AReaL, 7B, H800, 24 GPUs generate (assumed)", 5400, _steady("qwen2.5-7b")),
    ]


def held_out_rows() -> list[Row]:
    """Not fitted: newer engines, 8-bit weights and cache, largest batch that fits; batch and engine limits assumed."""
    rows = [
        ("llama-8b", "H100", 1, 1000, 2000, 13_900),
        ("llama-8b", "H200", 1, 1000, 2000, 16_800),
        ("llama-8b", "H100", 1, 128, 4096, 14_300),
        ("llama-8b", "H200", 1, 128, 4096, 18_000),
        ("llama-70b", "H200", 1, 1000, 2000, 2994),
        ("llama-70b", "H100", 2, 1000, 2000, 4146),
    ]
    return [
        Row(
            f"TensorRT-LLM 1.0, {model.removeprefix('llama-').upper()} fp8, {gpu}, TP{tp}, {prompt}/{output}",
            measured,
            _full(model, gpu, tp, prompt, output),
        )
        for model, gpu, tp, prompt, output, measured in rows
    ]


def generation_rows() -> list[Row]:
    """Whole steps of generation with tensor parallelism: StreamRL's, whose allocation makes them as long as training.

    Samples per second end to end by its Figure 8, over generation's share of the longer stage by its Figure 10.
    """
    return [
        Row("StreamRL 32B, 20K, 40 H800 generate", 2.45, _drained("qwen2.5-32b", 40)),
        Row("StreamRL 72B, 20K, 80 H800 generate", 2.25 * 0.83 / 0.81, _drained("qwen2.5-72b", 80)),
    ]


def run_rows() -> list[Row]:
    """Whole runs, samples per second. The trainer's duty is fitted to the first NUM_RUNS_FITTED."""
    far = [machines("H800", 2, region="a"), machines("H20", 4, region="b", nic_gbps=100)]
    link = {"a": "a", "b": "b", "bw_Gbps": 80, "latency_ms": 5}
    return [
        Row("StreamRL 7B, 16+16 H800 (allocation assumed)", 5.71, _run(streamrl("qwen2.5-7b", _h800(4)), 2)),
        Row("StreamRL 32B, 40+24 H800", 2.45, _run(streamrl("qwen2.5-32b", _h800(8)), 5)),
        Row("StreamRL 72B, 80+48 H800", 2.25, _run(streamrl("qwen2.5-72b", _h800(16)), 10)),
        Row("StreamRL 7B, 32 H20 + 16 H800, two sites", 5.95, _run(streamrl("qwen2.5-7b", far, links=[link]), None)),
        Row("AReaL 1.5B, 96+32 H800 (lengths assumed)", 38.4, _run(areal("qwen2.5-1.5b", _h800(16)), 12)),
        Row("AReaL 7B, 144+48 H800 (lengths assumed)", 22.4, _run(areal("qwen2.5-7b", _h800(24)), 18)),
        *(
            Row(f"verl 7B, {gpus}+{gpus} H20 (lengths assumed)", rate, _run(_verl(gpus // 4), gpus // 8))
            for gpus, rate in ((16, 27.8), (32, 43.3), (64, 54.4))
        ),
    ]


NUM_RUNS_FITTED = 5


def with_constants(problem: Problem, constants: CostConstants) -> Problem:
    """The problem with other constants; their `train_overhead_s` is per sample here."""
    workload = problem.workload
    overhead_s = constants.train_overhead_s * workload.prompts_per_step * workload.group_size
    return problem.model_copy(update={"cost_model": constants.model_copy(update={"train_overhead_s": overhead_s})})


def _h800(count: int) -> list[Document]:
    return [machines("H800", count)]


def _verl(count: int) -> Problem:
    workload = {
        "prompts_per_step": 512,
        "group_size": 16,
        "prompt_len": 150,
        "output_len": lognormal(200, 0.9, 28_672),
        "staleness": 1,
        "train_tasks": [{"name": "actor_train", "kind": "train"}],
    }
    return make_problem(f"verl-{count}", [machines("H20", count)], "qwen2.5-7b", workload=workload)


def _replica(
    constants: CostConstants, model: str, gpu: str, *, tp: int = 1, prompt: int, output: float, is_fp8: bool = False
) -> ReplicaModel:
    workload = {
        "prompts_per_step": 1024,
        "prompt_len": prompt,
        "output_len": {"type": "fixed", "length": output},
        "staleness": 1,
        "train_tasks": [{"name": "actor_train", "kind": "train"}],
    }
    problem = make_problem("row", [machines(gpu, 1)], model, workload=workload)
    if is_fp8:
        spec = problem.gpu_types[gpu]
        faster = spec.model_copy(update={"tflops_bf16": 2 * spec.tflops_bf16})
        small = problem.model.model_copy(update={"weight_bytes": 1.0, "kv_bytes": 1.0})
        problem = problem.model_copy(update={"model": small, "gpu_types": {gpu: faster}})
    problem = with_constants(problem, constants)
    return ReplicaModel(problem, demand_of(problem), problem.nodes[0], tp)


def _step(model: str, gpu: str, batch: int) -> Callable[[CostConstants], float]:
    def predict(constants: CostConstants) -> float:
        return batch / _replica(constants, model, gpu, prompt=_FIGURE_6_CONTEXT, output=1).step_s(batch)

    return predict


def _static(model: str, gpu: str, batch: int, prompt: int, output: int) -> Callable[[CostConstants], float]:
    """A batch that starts together: all prompts, then all completions."""

    def predict(constants: CostConstants) -> float:
        replica = _replica(constants, model, gpu, prompt=prompt, output=output)
        return batch * output / (batch * replica.prefill_s + output * replica.step_s(batch))

    return predict


def _burst(model: str, gpu: str, requests: int, prompt: int, output: int) -> Callable[[CostConstants], float]:
    """More equal requests than fit at a time: in waves, as few as possible."""

    def predict(constants: CostConstants) -> float:
        most = int(_replica(constants, model, gpu, prompt=prompt, output=output).max_batch)
        waves = -(-requests // most)
        return _static(model, gpu, round(requests / waves), prompt, output)(constants)

    return predict


def _full(model: str, gpu: str, tp: int, prompt: int, output: int) -> Callable[[CostConstants], float]:
    """As many as fit, permanently; on all `tp` GPUs."""

    def predict(constants: CostConstants) -> float:
        replica = _replica(constants, model, gpu, tp=tp, prompt=prompt, output=output, is_fp8=True)
        state = replica.at(replica.batch())
        return state.samples_per_second * output if state is not None else 0.0

    return predict


def _weights(model: str, gpu: str, tp: int, share: float) -> tuple[float, Callable[[CostConstants], float]]:
    """Passes over the weights per second at a measured share of the bandwidth; by the model, without fixed costs."""
    pass_s = float(MODELS[model]["params"]) * 2 / (tp * float(GPUS[gpu]["hbm_GBps"]) * 1e9)

    def predict(constants: CostConstants) -> float:
        layers_s = int(MODELS[model]["layers"]) * constants.layer_overhead_s
        return 1 / (pass_s / constants.eta_bw + layers_s)

    return share / pass_s, predict


def _steady(model: str) -> Callable[[CostConstants], float]:
    """One of AReaL's H800s with full memory, tokens per second."""
    problem = areal(model, _h800(1))

    def predict(constants: CostConstants) -> float:
        changed = with_constants(problem, constants)
        demand = demand_of(changed)
        replica = ReplicaModel(changed, demand, changed.nodes[0], 1)
        state = replica.at(replica.batch())
        return state.samples_per_second * demand.completion_tokens if state is not None else 0.0

    return predict


def _drained(model: str, gpus: int) -> Callable[[CostConstants], float]:
    """A step's samples start together on equal replicas, of the best degree, until the last has ended."""
    problem = streamrl(model, _h800(1))
    still_run = _still_run(streamrl_lengths())

    def rate(replica: ReplicaModel, num_samples: float) -> float:
        if num_samples > replica.max_batch:
            return 0.0
        return num_samples / sum(
            num_steps * replica.step_s(math.ceil(share * num_samples)) for num_steps, share in still_run
        )

    def predict(constants: CostConstants) -> float:
        changed = with_constants(problem, constants)
        demand, (node,) = demand_of(changed), changed.nodes
        return max(
            gpus // tp * rate(ReplicaModel(changed, demand, node, tp), demand.samples_per_step * tp / gpus)
            for tp, pp in layouts(changed, demand, node)
            if pp == 1
        )

    return predict


def _still_run(histogram: Document) -> list[tuple[float, float]]:
    """Consecutive decode steps, and the share of samples still running in the middle of them."""
    total, ended = sum(histogram["fractions"]), 0.0
    found = [(float(histogram["start"]), 1.0)]
    for fraction in histogram["fractions"]:
        found.append((float(histogram["width"]), 1 - (ended + fraction / 2) / total))
        ended += fraction
    return found


def _run(problem: Problem, generating: int | None) -> Callable[[CostConstants], float]:
    """The first machines generate, at the best tensor-parallel degree, the rest trains; with None, the H20 generate."""
    names = [(f"{node.name}-{index}", node) for node in problem.nodes for index in range(node.count)]
    if generating is None:
        gen = [name for name, node in names if node.gpu == "H20"]
    else:
        gen = [name for name, _ in names[:generating]]
    train = [{"node": name, "gpus": node.gpus} for name, node in names if name not in gen]

    def predict(constants: CostConstants) -> float:
        model = CostModel(with_constants(problem, constants))
        plans: Sequence[PlanDocument] = [
            PlanDocument.model_validate(
                {"gen": [{"node": name, "tp": tp, "count": 8 // tp} for name in gen], "train": train}
            )
            for tp in model.degrees[problem.nodes[-1].name]
        ]
        return max(model.score(plan).samples_per_second for plan in plans)

    return predict
