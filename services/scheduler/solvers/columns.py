"""Solves the integer program over columns: how many machines of each entry are divided in which way.

It maximises the smaller of the generators' and the trainers' rates. Pauses and the fixed time of a training step make
both concave in the sums of rates; tangents bound them from above, so the solver's own bound bounds every plan. Slow
links to generators, all-reduce inside a region and the staleness bound, which only take away, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from ortools.math_opt.python import mathopt

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.problem import NodeClass
from services.scheduler.solvers.divisions import Division, Split, made_by
from services.scheduler.solvers.scored import Parts, ordered_nodes

_NUM_TANGENTS = 16
_GAP = 1e-4


_Counts = list[tuple[NodeClass, list[tuple[Split, mathopt.Variable]]]]
"""Entries with their splits, each with the number of machines divided so."""


@dataclass(frozen=True, slots=True)
class ColumnSolution:
    """The program's answer for one training site."""

    parts: Parts | None
    """None if time ended before anything was found, or nothing fits."""
    upper_bound: float
    """Samples per second that no plan training there exceeds; infinite if the solver proved no bound."""


def solve_columns(
    model: CostModel, columns: Mapping[str, Sequence[Split]], home: frozenset[str], *, limit_s: float, seed: int
) -> ColumnSolution:
    """The best sums of rates with training in the regions of `home` only."""
    problem, demand = model.problem, model.demand
    program = mathopt.Model(name="columns")
    counts: _Counts = []
    for node in ordered_nodes(problem):
        allowed = [split for split in columns[node.name] if node.region in home or split.train_gpus == 0]
        chosen = [(split, program.add_integer_variable(lb=0, ub=node.count)) for split in allowed]
        counts.append((node, chosen))
        program.add_linear_constraint(mathopt.fast_sum(count for _, count in chosen) == node.count)

    def total(value: Callable[[NodeClass, Split], float]) -> mathopt.LinearExpression:
        return mathopt.fast_sum(value(node, split) * count for node, chosen in counts for split, count in chosen)

    made = total(lambda node, split: made_by(model, node, (split,)))
    trained = total(lambda node, split: split.train_gpus * model.gpu_training_rate[node.name])
    # In GB, to be of a similar magnitude to the rates; what meshes need in each GPU besides is left out.
    memory = total(lambda node, split: split.train_gpus * model.usable_bytes[node.name] / 1e9)
    program.add_linear_constraint(memory >= model.pool_memory.bounding_bytes / 1e9)
    # Pipelines send no gradients over links.
    is_bounded = len(home) > 1 and not model.pool_memory.is_even
    throughput = program.add_variable(lb=0, ub=_spanning_ceiling(model) if is_bounded else math.inf)
    for rate, most, lost_s in (
        (made, _most_made(model, columns), problem.cost_model.sync_pause_s),
        (trained, _most_trained(model), problem.cost_model.train_overhead_s),
    ):
        for value, slope, at in _tangents(most, lost_s / demand.samples_per_step):
            program.add_linear_constraint(throughput <= value + slope * (rate - at))
    program.maximize(throughput)
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=limit_s), relative_gap_tolerance=_GAP, random_seed=seed % 2**31
    )
    # Not HiGHS: it sometimes prints a line of its own to the standard output, where JSON is expected.
    result = mathopt.solve(program, mathopt.SolverType.GSCIP, params=parameters)
    bound = result.termination.objective_bounds.dual_bound
    parts = None
    if result.has_primal_feasible_solution():
        values = result.variable_values()
        parts = tuple(
            Division(node, tuple(split for split, count in chosen for _ in range(round(values[count]))))
            for node, chosen in counts
        )
    if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        return ColumnSolution(None, 0.0)
    return ColumnSolution(parts, bound if math.isfinite(bound) else math.inf)


def _spanning_ceiling(model: CostModel) -> float:
    """Samples per second of a pool that spans regions: gradients cross the fastest link at least once per step."""
    links = [link.bw_Gbps * 1e9 / 8 for link in model.problem.links if link.a != link.b]
    allreduce_s = model.demand.gradient_bytes / max(links)
    return model.demand.samples_per_step / (allreduce_s + model.problem.cost_model.train_overhead_s)


def _most_made(model: CostModel, columns: Mapping[str, Sequence[Split]]) -> float:
    return sum(
        node.count * max(made_by(model, node, (split,)) for split in columns[node.name]) for node in model.problem.nodes
    )


def _most_trained(model: CostModel) -> float:
    return sum(node.count * node.gpus * model.gpu_training_rate[node.name] for node in model.problem.nodes)


def _tangents(most: float, lost_per_sample_s: float) -> list[tuple[float, float, float]]:
    """Tangents of rate / (1 + lost rate) at rates up to `most`: value, slope and where; one line if nothing is lost."""
    num_tangents = _NUM_TANGENTS if lost_per_sample_s > 0 else 1
    points = [most * index / num_tangents for index in range(num_tangents)]
    kept = [1 / (1 + lost_per_sample_s * point) for point in points]
    return [(point * share, share**2, point) for point, share in zip(points, kept, strict=True)]
