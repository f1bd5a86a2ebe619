"""What limits the rows that are short of the papers, in the cost model and by the trainer's own terms.

Each line is one way to divide a cluster's machines, in the best mesh of its training pool, with the cost model's rate
under the staleness bound that the comparison assumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.scheduler.comparisons import HETRL_CASES, HETRL_PACK, HEX_PACK, by_trainer, hetrl_cluster, hex_cluster
from services.scheduler.cost_model.calibrated import CALIBRATED, make_model
from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_document import PlanDocument, Replicas, TrainShare
from simulator.virtual_run.build_run import with_staleness

COLUMNS = ("what trains", "mesh", "samples/s", "limit", "computes, s", "exchanges that it does not hide, s")


@dataclass(frozen=True, slots=True)
class Reason:
    """One division of a comparison's cluster."""

    name: str
    trains: str
    mesh: str
    samples_per_second: float
    limit: str
    compute_s: float
    exchange_s: float

    @property
    def cells(self) -> tuple[str, ...]:
        """By COLUMNS, the comparison's name before what trains."""
        what = f"{self.name}: {self.trains}"
        seconds = (f"{self.compute_s:.1f}", f"{self.exchange_s:.1f}")
        return (what, self.mesh, f"{self.samples_per_second:.2f}", self.limit, *seconds)


def reasons() -> Iterator[Reason]:
    """AReaL-Hex's H20s beside the H800s, and HetRL's pools over one and several regions."""
    for size in ("1.5b", "7b", "14b"):
        model = _hex_model(size, 1, 6)
        ours, others = _machines(model, "H800"), _machines(model, "H20")
        for count in (0, 2, 4):
            yield _reason(f"AReaL-Hex {size.upper()}", model, [*ours, *others[:count]])
        yield _reason(f"AReaL-Hex {size.upper()}", model, others[:5])
    for scenario in ("S2", "S4"):
        model = _hetrl_model(scenario)
        for kind in ("A100-40", "L40S"):
            machines = _machines(model, kind)
            for count in (1, len(machines)):
                yield _reason(f"HetRL {scenario}, 4B", model, machines[:count])


NEED_COLUMNS = ("what", "samples/s needed", "ours", "limit", "step: needed, taken", "longest sample: needed, taken")
_HEX_PAPER = {"1.5b": 1.36, "7b": 1.31, "14b": 1.5}
_HETRL_PAPER = {"S2": 1.11, "S4": 2.25}


def needs() -> Iterator[tuple[str, ...]]:
    """What the papers' ratios need, and what the fastest division of whole machines takes, by the cost model; seconds.

    Where the ratio would take a shorter step, or an earlier end of the longest sample, than that division has, this
    term forbids it. Baselines are AReaL-Hex's 24 H800, and HetRL's GPU types that each do one thing.
    """
    for size, ratio in _HEX_PAPER.items():
        base = _fastest(_hex_model(size, 3, 0))[1]
        yield _needed(f"AReaL-Hex {size.upper()}", _hex_model(size, 1, 6), ratio, base)
    for scenario, ratio in _HETRL_PAPER.items():
        model = _hetrl_model(scenario)
        yield _needed(f"HetRL {scenario}, 4B", model, ratio, _fastest(model, has_whole_types=True)[1])


def _needed(name: str, model: CostModel, ratio: float, base: Score) -> tuple[str, ...]:
    trains, best = _fastest(model)
    needed = ratio * base.samples_per_second
    samples, versions = model.demand.samples_per_step, model.problem.workload.staleness + 1
    token_s = min(each.state.step_s for each in best.generation if each.state is not None)
    return (
        f"{name}: {trains} train",
        f"{needed:.2f} ({ratio} x {base.samples_per_second:.2f})",
        f"{best.samples_per_second:.2f}",
        best.limit.value,
        f"{samples / needed:.1f}, {best.training.step_s:.1f}",
        f"{versions * samples / needed:.0f}, {model.demand.longest_completion_tokens * token_s:.0f}",
    )


def _hex_model(size: str, h800: int, h20: int) -> CostModel:
    return with_staleness(make_model(by_trainer(hex_cluster(size, h800, h20), HEX_PACK), CALIBRATED), 1)


def _hetrl_model(scenario: str) -> CostModel:
    problem = by_trainer(hetrl_cluster(scenario, *HETRL_CASES[0]), HETRL_PACK)
    return with_staleness(make_model(problem, CALIBRATED), 1)


def _fastest(model: CostModel, *, has_whole_types: bool = False) -> tuple[str, Score]:
    """The best division of whole machines, or of all machines of each type, and what trains in it."""
    found = list[tuple[str, Score]]()
    for counts in product(*(range(node.count + 1) for node in model.problem.nodes)):
        pairs = list(zip(model.problem.nodes, counts, strict=True))
        pool = [TrainShare(node=node.machine(index), gpus=node.gpus) for node, count in pairs for index in range(count)]
        training = {model.nodes[share.node].gpu for share in pool}
        if not pool or len(pool) == len(model.nodes):
            continue
        if has_whole_types and any(count < node.count for node, count in pairs if node.gpu in training):
            continue
        shares, mesh = model.pools.arranged(pool, model.nodes)
        kinds = Counter[str]()
        for share in pool:
            kinds[model.nodes[share.node].gpu] += share.gpus
        trains = " and ".join(f"{gpus} {kind}" for kind, gpus in kinds.items())
        for gen in _generators(model, [share.node for share in pool]):
            score = model.score(PlanDocument(gen=gen, train=shares, mesh=mesh))
            if isinstance(score, Score):
                found.append((trains, score))
    return max(found, key=lambda each: each[1].samples_per_second)


def _machines(model: CostModel, gpu: str) -> list[str]:
    return [name for name, node in model.nodes.items() if node.gpu == gpu]


def _reason(name: str, model: CostModel, training: Sequence[str]) -> Reason:
    """The best of all tensor-parallel degrees on the machines that do not train, alike on those of a type."""
    pool = [TrainShare(node=machine, gpus=model.nodes[machine].gpus) for machine in training]
    shares, mesh = model.pools.arranged(pool, model.nodes)
    scores = [model.score(PlanDocument(gen=gen, train=shares, mesh=mesh)) for gen in _generators(model, training)]
    best = max(scores, key=lambda score: score.samples_per_second)
    kinds = dict.fromkeys(model.nodes[machine].gpu for machine in training)
    regions = len({model.nodes[machine].region for machine in training})
    trains = " and ".join(
        f"{sum(share.gpus for share in pool if model.nodes[share.node].gpu == kind)} {kind}" for kind in kinds
    )
    trains += f" in {regions} regions" if regions > 1 else ""
    if isinstance(best, Infeasible):
        return Reason(name, trains, _shown(mesh), 0.0, best.reason, 0.0, 0.0)
    step = best.training
    return Reason(
        name,
        trains,
        _shown(mesh),
        best.samples_per_second,
        best.limit.value,
        step.compute_s,
        step.exposed_allreduce_s,
    )


def _generators(model: CostModel, training: Sequence[str]) -> Iterator[tuple[Replicas, ...]]:
    rest = [name for name in model.nodes if name not in training]
    for most in (1, 2, 4, 8):
        gen = []
        for name in rest:
            if fitting := [degree for degree in model.degrees[model.nodes[name].name] if degree <= most]:
                degree = fitting[-1]
                gen.append(Replicas(node=name, tp=degree, count=model.nodes[name].gpus // degree))
        yield tuple(gen)


def _shown(mesh: Mesh | None) -> str:
    if mesh is None:
        return "one copy"
    if mesh.pipeline > 1:
        layers = "+".join(map(str, mesh.layers_per_stage or ()))
        num_islands = len(mesh.islands or ())
        return f"stages of {layers} layers" + (f", {num_islands} islands" if num_islands > 1 else "")
    if mesh.tensor > 1:
        return f"layers split {mesh.tensor} ways"
    if mesh.expert > 1:
        return f"experts divided {mesh.expert} ways"
    return f"islands of {', '.join(map(str, mesh.islands or ()))}"
