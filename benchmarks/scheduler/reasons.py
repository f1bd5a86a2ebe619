"""What limits the rows that are short of the papers, in the cost model and by the trainer's own terms.

Each line is one way to divide a cluster's machines, in the best mesh of its training pool, with the cost model's rate
under the staleness bound that the comparison assumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.scheduler.comparisons import HETRL_CASES, HETRL_PACK, HEX_PACK, by_trainer, hetrl_cluster, hex_cluster
from services.scheduler.cost_model.calibrated import CALIBRATED, make_model
from services.scheduler.cost_model.reference import CostModel, Infeasible
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
        model = with_staleness(make_model(by_trainer(hex_cluster(size, 1, 6), HEX_PACK), CALIBRATED), 1)
        ours, others = _machines(model, "H800"), _machines(model, "H20")
        for count in (0, 2, 4):
            yield _reason(f"AReaL-Hex {size.upper()}", model, [*ours, *others[:count]])
        yield _reason(f"AReaL-Hex {size.upper()}", model, others[:5])
    for scenario in ("S2", "S4"):
        problem = by_trainer(hetrl_cluster(scenario, *HETRL_CASES[0]), HETRL_PACK)
        model = with_staleness(make_model(problem, CALIBRATED), 1)
        for kind in ("A100-40", "L40S"):
            machines = _machines(model, kind)
            for count in (1, len(machines)):
                yield _reason(f"HetRL {scenario}, 4B", model, machines[:count])


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
