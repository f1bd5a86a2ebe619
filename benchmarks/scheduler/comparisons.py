"""Simulates the papers' comparisons: ours against each baseline in its best configuration, with one calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.scheduler.best import Best, best_colocated, best_plan, whole_types
from benchmarks.scheduler.problems.settings import (
    ACTOR,
    PPO_TASKS,
    PRICES,
    Document,
    areal,
    lognormal,
    machines,
    make_problem,
    streamrl,
)
from services.scheduler.problem.problem import NodeClass, Problem
from simulator.virtual_run.build_run import Mode
from simulator.virtual_run.event_loop import Options

ONE_STEP, ASYNC, STREAMING = (Options(mode=mode) for mode in (Mode.ONE_STEP, Mode.ASYNC, Mode.STREAMING))
STREAMRL = Options(mode=Mode.ONE_STEP, drains=True, can_move=False)
"""One step behind; a sample ends where and under which weights it began, since StreamRL's instances do not communicate
and it rules out partial rollouts."""
COLOCATED = Options(mode=Mode.COLOCATED_SYNC)
AS_THEY_CAME = Options(mode=Mode.COLOCATED_SYNC, longest_first=False, can_move=False)
_H20_COST = 1.0 / 2.85
"""Cost of an H20 machine over an H800 one, as StreamRL states it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row of the results."""

    name: str
    paper: str
    wanted: tuple[float, float | None]
    """Lowest value that reproduces the paper's result, and the highest credible one, if any."""
    ours: float
    how: str
    """The compared configurations."""

    @property
    def is_shown(self) -> bool:
        """Whether the simulation reproduces the paper's result."""
        low, high = self.wanted
        return self.ours >= low and (high is None or self.ours <= high)


def areal_hex() -> Iterator[Comparison]:
    """8 H800 + 48 H20 against 24 H800; and the fewest H20 that keep up."""
    for size, paper in (("1.5b", 1.36), ("7b", 1.31), ("14b", 1.50)):
        alone = best_plan(hex_cluster(size, 3, 0), ASYNC)
        mixed = best_plan(hex_cluster(size, 1, 6), ASYNC)
        gain = mixed.samples_per_second / alone.samples_per_second
        yield Comparison(
            f"AReaL-Hex {size.upper()}: 8 H800 + 48 H20 over 24 H800 (ideal 1.95-2.0)",
            f"{paper}",
            (paper, 2.0),
            gain,
            f"{mixed.shown}; {alone.shown}",
        )
        for count in range(1, 9):
            cheap = best_plan(hex_cluster(size, 1, count), ASYNC)
            if cheap.samples_per_second >= alone.samples_per_second:
                break
        cost = 3 * PRICES["H800"] / (PRICES["H800"] + count * PRICES["H20"])
        yield Comparison(
            f"AReaL-Hex {size.upper()}: cost of 24 H800 over that of 8 H800 + {8 * count} H20, which are as fast",
            "1.46",
            (1.46, None),
            cost,
            f"{cheap.shown}: {cheap.samples_per_second:.3g} samples/s, 24 H800 {alone.samples_per_second:.3g}",
        )


def hetrl() -> Iterator[Comparison]:
    """24 A100, 24 L40S and 16 L4 in four networks, GRPO with 4B, 8B and 14B and PPO with 8B: their range."""
    bands: dict[str, tuple[str, float, str, float]] = {
        "S1": ("1.51-2.05", 1.5, "1.10-1.31", 1.10),
        "S2": ("3.01-4.99", 3.0, "1.11-1.27", 1.11),
        "S3": ("1.40-3.07", 1.4, "1.19-1.50", 1.19),
        "S4": ("2.24-5.46", 2.2, "2.25-3.72", 2.25),
    }
    for scenario, (sync_paper, sync_low, async_paper, async_low) in bands.items():
        syncs, asyncs = [], []
        for size, tasks in HETRL_CASES:
            problem = hetrl_cluster(scenario, size, tasks)
            blind = best_colocated(problem, AS_THEY_CAME, is_blind=True).samples_per_second
            aware = max(
                best_plan(problem, STREAMING).samples_per_second,
                best_colocated(problem, COLOCATED).samples_per_second,
            )
            syncs.append(aware / blind)
            two_groups = best_plan(problem, ONE_STEP, allowed=whole_types).samples_per_second
            asyncs.append(best_plan(problem, ONE_STEP).samples_per_second / two_groups)
        yield _range(f"HetRL {scenario}, synchronous: over a plan blind to GPU types", sync_paper, sync_low, syncs)
        yield _range(
            f"HetRL {scenario}, one step behind: over two groups of whole types", async_paper, async_low, asyncs
        )


def streamrl_breakdown() -> Iterator[Comparison]:
    """72B, 20K: one component after the other."""
    problem = streamrl("qwen2.5-72b", [machines("H800", 16)])
    base = best_colocated(problem, AS_THEY_CAME).samples_per_second
    parts: Sequence[tuple[str, float, Callable[[], float]]] = (
        ("longest first", 1.08, lambda: best_colocated(problem, COLOCATED).samples_per_second),
        ("disaggregated, streaming", 1.23, lambda: best_plan(problem, STREAMING).samples_per_second),
        ("one step behind", 1.48, lambda: best_plan(problem, STREAMRL).samples_per_second),
    )
    for name, paper, rate in parts:
        wanted = (1.3, 1.6) if name == "one step behind" else (1.0, None)
        yield Comparison(f"StreamRL 72B, 20K, + {name}", f"{paper}", wanted, rate() / base, "over colocated")


def streamrl_settings() -> Iterator[Comparison]:
    """Three sizes, three lengths: one step behind over colocated, with the same kernels."""
    papers = {"7b": (4, (1.64, 1.33, 1.19)), "32b": (8, (1.27, 1.28, 1.32)), "72b": (16, (1.75, 1.53, 1.48))}
    for size, (count, paper) in papers.items():
        for scale, name, published in zip((0.25, 0.5, 1.0), ("5K", "10K", "20K"), paper, strict=True):
            problem = streamrl(f"qwen2.5-{size}", [machines("H800", count)], scale=scale)
            ours, base = best_plan(problem, STREAMRL), best_colocated(problem, AS_THEY_CAME)
            gain = ours.samples_per_second / base.samples_per_second
            yield Comparison(
                f"StreamRL {size.upper()}, {name}: over colocated",
                f"{published}",
                (1.19, None),
                gain,
                f"{ours.shown}; {base.shown}",
            )


def streamrl_sites() -> Iterator[Comparison]:
    """7B: 16 H800 and up to 32 H20 80 Gbps apart against 32 H800, by StreamRL's relative prices.

    As in StreamRL, the H800 train, and unneeded H20 are given up.
    """
    for scale, name, published in ((0.25, "5K", 1.26), (0.5, "10K", 1.31), (1.0, "20K", 1.23)):
        alone = best_plan(streamrl("qwen2.5-7b", [machines("H800", 4)], scale=scale), STREAMRL)
        apart = {count: _apart(scale, count) for count in (1, 2, 3, 4)}
        value = {count: best.samples_per_second / (2 + count * _H20_COST) for count, best in apart.items()}
        count = max(value, key=lambda each: value[each])
        yield Comparison(
            f"StreamRL 7B, {name}: samples per cost, H20 + H800 in two sites over 32 H800",
            f"{published}",
            (1.23, None),
            value[count] / (alone.samples_per_second / 4),
            f"{apart[count].shown}; {alone.shown}",
        )


def _apart(scale: float, h20: int) -> Best:
    far = [machines("H800", 2, region="a"), machines("H20", h20, region="b", nic_gbps=100)]
    link = {"a": "a", "b": "b", "bw_Gbps": 80, "latency_ms": 5}
    return best_plan(streamrl("qwen2.5-7b", far, scale=scale, links=[link]), STREAMRL, allowed=whole_types)


def areal_staleness() -> dict[int, float]:
    """Tokens per second of AReaL's 1.5B on 128 H800, three quarters of which generate, by staleness bound."""
    rates = {}
    for bound in (0, 1, 2, 4, 8, 16):
        cost_model = {"kv_recompute_on_update": True}
        problem = areal("qwen2.5-1.5b", [machines("H800", 16)], staleness=bound, cost_model=cost_model)
        options = ASYNC if bound else STREAMING
        rates[bound] = best_plan(problem, options, allowed=_a_quarter).tokens_per_second
    return rates


def _a_quarter(nodes: Sequence[NodeClass], training: Sequence[int]) -> bool:
    return sum(training) * 4 == sum(node.count for node in nodes)


HEX_PACK, HETRL_PACK = 32_768, 16_384
"""Tokens of a trainer's pass where its own terms are charged: at least a whole sample."""
_GRPO = ({"name": "ref_logp", "kind": "infer"}, {"name": "reward_model", "kind": "infer"}, ACTOR)


HETRL_CASES = (("4b", _GRPO), ("8b", _GRPO), ("14b", _GRPO), ("8b", PPO_TASKS))


def _range(name: str, paper: str, low: float, gains: Sequence[float]) -> Comparison:
    return Comparison(name, paper, (low, None), min(gains), f"the least; the most is {max(gains):.2f}")


def trainers_terms() -> Iterator[Comparison]:
    """The rows that are short of the papers, with memory, traffic and meshes of Penstock's own trainer for all."""
    for size, paper in (("1.5b", 1.36), ("7b", 1.31), ("14b", 1.50)):
        alone, mixed = (best_plan(by_trainer(hex_cluster(size, *count), HEX_PACK), ASYNC) for count in ((3, 0), (1, 6)))
        gain = mixed.samples_per_second / alone.samples_per_second
        name = f"AReaL-Hex {size.upper()}: 8 H800 + 48 H20 over 24 H800"
        yield Comparison(name, f"{paper}", (paper, 2.0), gain, f"{mixed.shown}; {alone.shown}")
    for scenario, paper_range, low in (("S2", "1.11-1.27", 1.11), ("S4", "2.25-3.72", 2.25)):
        gains = []
        for size, tasks in HETRL_CASES:
            problem = by_trainer(hetrl_cluster(scenario, size, tasks), HETRL_PACK)
            two_groups = best_plan(problem, ONE_STEP, allowed=whole_types).samples_per_second
            gains.append(best_plan(problem, ONE_STEP).samples_per_second / two_groups)
        name = f"HetRL {scenario}, one step behind: over two groups of whole types"
        yield _range(name, paper_range, low, gains)


def by_trainer(problem: Problem, pack_tokens: int) -> Problem:
    """The problem with memory, traffic and meshes of Penstock's own trainer."""
    constants = problem.cost_model.model_copy(update={"train_pack_tokens": pack_tokens})
    return problem.model_copy(update={"cost_model": constants})


def hex_cluster(size: str, h800: int, h20: int) -> Problem:
    """AReaL-Hex's clusters; batch, lengths and staleness are inferred, see docs/results.md."""
    nodes = [machines("H800", h800, nic_gbps=40)]
    links = []
    if h20:
        nodes.append({**machines("H20", h20, nic_gbps=40), "region": "h20"})
        links = [{"a": "r0", "b": "h20", "bw_Gbps": 12, "latency_ms": 0.1}]
    constraints = {"max_tp": 8, "train_single_region": False}
    return areal(
        f"qwen2.5-{size}",
        nodes,
        prompts=20,
        staleness=1,
        links=links,
        cost_model={"sync_pause_s": 2.0},
        constraints=constraints,
    )


def hetrl_cluster(scenario: str, size: str, tasks: Sequence[Document] = _GRPO) -> Problem:
    """HetRL's machines; its link matrix is not published, so bandwidths are spread evenly over its ranges."""
    gpus = [("A100-40", 3, 400.0), ("L40S", 3, 400.0), ("L4", 2, 100.0)]
    ranges = {"S3": (1.9, 5.0, 5, 30), "S4": (0.9, 5.0, 5, 60)}
    links: list[Document] = []
    if scenario == "S1":
        nodes = [machines(gpu, count, nic_gbps=nic) for gpu, count, nic in gpus]
    elif scenario == "S2":
        regions = ("ohio", "virginia", "edge")
        nodes = [
            machines(gpu, count, nic_gbps=nic, region=region)
            for (gpu, count, nic), region in zip(gpus, regions, strict=True)
        ]
        links = [_link("ohio", "virginia", 5, 10), _link("ohio", "edge", 1, 10), _link("virginia", "edge", 1, 10)]
    else:
        low, high, near, far = ranges[scenario]
        flat = [(gpu, nic, f"{gpu.lower()}{index}") for gpu, count, nic in gpus for index in range(count)]
        nodes = [machines(gpu, 1, nic_gbps=nic, region=region) for gpu, nic, region in flat]
        pairs = list(combinations([region for _, _, region in flat], 2))
        for index, (one, other) in enumerate(pairs):
            # A fixed shuffle, so that no type gets all the fast links.
            share = index * 11 % len(pairs) / (len(pairs) - 1)
            links.append(_link(one, other, high - share * (high - low), near + share * (far - near)))
    workload = {
        "prompts_per_step": 128,
        "group_size": 8,
        "prompt_len": 150,
        "output_len": lognormal(300, 0.45, 1024),
        "staleness": 1,
        "train_tasks": tasks,
    }
    constraints = {"max_tp": 8, "train_single_region": False}
    name = f"het-{scenario}-{size}"
    return make_problem(name, nodes, f"qwen3-{size}", workload=workload, links=links, constraints=constraints)


def _link(one: str, other: str, gbps: float, latency_ms: float) -> Document:
    return {"a": one, "b": other, "bw_Gbps": gbps, "latency_ms": latency_ms}
