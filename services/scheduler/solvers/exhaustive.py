"""Searches exhaustively: the truth on small problems.

Every plan that the cost model can tell apart gets an upper bound from sums that are cheap to compute; plans are scored
from the highest bound down, until the next bound is not above the best score. The rest cannot be better, so the best is
optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.solvers.divisions import Division, divisions, plan_of
from services.scheduler.solvers.generation_bound import GenerationBound
from services.scheduler.solvers.interface import Plans, ProblemTooLargeError, Solution, TimeLeft, part_of
from services.scheduler.solvers.scored import Parts, parts_of

MAX_PLANS = 6_000_000
"""Most plans to bound; each takes some 50 bytes at the peak."""
_MAX_DIVISIONS = 100_000
_LISTING_SHARE = 0.25
"""Share of the time for the list of plans: a longer list leaves too little to score them, and `auto` has other searches
for what is left."""

Free = Mapping[str, Sequence[int]]
"""GPUs of each machine of a node entry that services leave."""
_Array = npt.NDArray[np.float64]


class ExhaustiveSolver:
    """Scores every plan that may be optimal."""

    name = "exhaustive"

    def solve(self, model: CostModel, *, time_left: TimeLeft, seed: int, starts: Plans = ()) -> Solution:
        """The best plan; or, if time runs out, the best so far and a bound on the rest."""
        candidates = ranked(model, time_left=part_of(time_left, _LISTING_SHARE))
        best: tuple[PlanDocument | None, Score | Infeasible] = (None, no_plan(model))
        for start in (plan_of(model, parts_of(model, start)) for start in starts):
            if (score := model.score(start)).samples_per_second > best[1].samples_per_second:
                best = (start, score)
        num_evaluated = 0
        for bound, parts in candidates:
            if bound <= best[1].samples_per_second:
                break
            if time_left() <= 0:
                return Solution(*best, bound, False, num_evaluated, self.name)
            plan = plan_of(model, parts)
            num_evaluated += 1
            score = model.score(plan)
            if isinstance(score, Score):
                best = max(best, (plan, score), key=lambda each: each[1].samples_per_second)
            elif num_evaluated == 1 and best[0] is None:
                best = (None, score)
        return Solution(*best, best[1].samples_per_second, True, num_evaluated, self.name)


def no_plan(model: CostModel) -> Infeasible:
    """Why nothing is worth a score: as a rule not even all GPUs can train together."""
    everything = [(node, node.gpus * node.count) for node in model.problem.nodes]
    return Infeasible(model.pool_memory.error(everything) or "no plan's memory suffices")


def ranked(
    model: CostModel, *, time_left: TimeLeft, free: Free | None = None, above: float = 0.0
) -> Iterator[tuple[float, Parts]]:
    """Every plan that the cost model can tell apart and its bound, the highest first. Raises ProblemTooLargeError.

    Args:
        model: The problem and its cost model.
        time_left: Time left for the list.
        free: GPUs of each machine that are divided, by node entry; None for all.
        above: Plans whose bound is not above it are left out.
    """
    choices = _choices(model, time_left, free)
    bounds = _upper_bounds(model, choices, time_left)
    candidates = np.flatnonzero(bounds > above)
    candidates = candidates[np.argsort(-bounds[candidates], kind="stable")]
    shape = tuple(len(options) for options in choices)

    def parts(candidate: int) -> Parts:
        indices = np.unravel_index(candidate, shape)
        return tuple(options[index] for options, index in zip(choices, indices, strict=True))

    return ((float(bounds[candidate]), parts(candidate)) for candidate in candidates)


def _choices(model: CostModel, time_left: TimeLeft, free: Free | None) -> list[list[Division]]:
    # The choice of training GPUs per entry alone distinguishes plans: far too large problems are recognised without a
    # list.
    left = {node.name: (node.gpus,) * node.count if free is None else free[node.name] for node in model.problem.nodes}
    least_plans = math.prod(sum(gpus) + 1 for gpus in left.values())
    choices, num_plans = [], 1
    for node in model.problem.nodes:
        options = None
        if least_plans <= MAX_PLANS:
            options = divisions(model, node, most=_MAX_DIVISIONS, time_left=time_left, free=left[node.name])
        num_plans *= _MAX_DIVISIONS if options is None else len(options)
        if options is None or num_plans > MAX_PLANS:
            raise _too_large()
        choices.append(options)
    return choices


def _too_large() -> ProblemTooLargeError:
    return ProblemTooLargeError(
        f"exhaustive: more than {MAX_PLANS:,} plans, or more than could be listed in this time, which is too many to "
        "score; use --solver milp"
    )


def _upper_bounds(model: CostModel, choices: list[list[Division]], time_left: TimeLeft) -> _Array:
    """Throughput that no plan exceeds, flat in row-major order of the choices; 0 if it cannot run.

    Assumes the best batches for the samples under way, only fresh samples, the shortest pause and the fastest NIC.
    Raises ProblemTooLargeError once time is over.
    """
    problem, demand = model.problem, model.demand

    def summed(value: Callable[[Division], float]) -> _Array:
        if time_left() <= 0:
            raise _too_large()
        total: _Array = np.zeros(1)
        for options in choices:
            total = (total[:, np.newaxis] + np.array([value(part) for part in options], dtype=np.float64)).ravel()
        return total

    generation = GenerationBound(model)
    made: _Array = np.full(1, math.inf)
    for index, price in enumerate(generation.prices):
        sums = summed(partial(_worth_of, generation, index))
        made = np.minimum(made, sums + price * generation.most_under_way)
    made /= 1 + made * problem.cost_model.sync_pause_s / demand.samples_per_step
    trained = summed(lambda part: part.train_gpus * model.gpu_training_rate[part.node.name])
    nodes = summed(lambda part: part.train_nodes)
    with np.errstate(divide="ignore"):
        compute_s = demand.samples_per_step / trained
        nic = max(node.nic_Gbps for node in problem.nodes) * 1e9 / 8
        # RM-1's ring; what a mesh exchanges depends on the mesh.
        is_rm1 = not model.pool_memory.is_even
        allreduce_s = is_rm1 * 2 * np.maximum(0.0, 1 - 1 / nodes) * demand.gradient_bytes / nic
        exposed_s = np.maximum(0.0, allreduce_s - problem.cost_model.dp_overlap * compute_s)
        step_s = compute_s + np.where(trained > 0, exposed_s, 0.0) + problem.cost_model.train_overhead_s
        bounds: _Array = np.minimum(made, demand.samples_per_step / step_s)
    # No mesh holds less than one copy of the state in all, unless machines hold it.
    offered = summed(lambda part: part.train_gpus * model.usable_bytes[part.node.name])
    lacks_memory = offered < model.pool_memory.bounding_bytes
    bounds[lacks_memory | (trained <= 0)] = 0
    if problem.constraints.train_single_region:

        def trained_in(region: str) -> _Array:
            return summed(lambda part: part.train_gpus * (part.node.region == region))

        regions = sorted({node.region for node in problem.nodes})
        bounds[np.sum([trained_in(region) > 0 for region in regions], axis=0) > 1] = 0
    # Summed in another order than the score, they may round below it.
    return bounds * (1 + 1e-12)


def _worth_of(generation: GenerationBound, price: int, part: Division) -> float:
    """Of all replicas of an entry's machines, at a price."""
    worth = generation.worth[part.node.name][price]
    return float(np.dot(part.sums[: len(worth)], worth))
