"""A plan's report: throughput, cost, bottleneck, simulation and advice, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from services.scheduler.cost_model.reference import CostModel, Infeasible, Limit, Score
from services.scheduler.planning.market import Alternative, Purchase, usd_per_hour
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.service_placement.service_places import weight_routes
from services.scheduler.solvers.interface import Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The outcome of a search."""

    model: CostModel
    solution: Solution
    solve_s: float

    @property
    def reason(self) -> str | None:
        """Why no plan can run."""
        return self.solution.score.reason if isinstance(self.solution.score, Infeasible) else None

    @property
    def gap(self) -> float | None:
        """The plan's gap to the solver's upper bound, as a share of the bound; None without a bound."""
        bound = self.solution.upper_bound_samples_per_second
        return 1 - self.solution.score.samples_per_second / bound if bound else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeasiblePlan(PlanReport):
    """A feasible plan."""

    plan: PlanDocument
    score: Score
    simulated_samples_per_second: float | None = None
    """Rate of a simulated run; None if it was not simulated, got stuck, or time was too short."""
    next_purchases: Sequence[Purchase] = ()
    alternatives: Sequence[Alternative] = ()
    """Cheaper clusters."""

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens trained on."""
        return self.score.samples_per_second * self.model.demand.completion_tokens

    @property
    def step_s(self) -> float:
        """Time of a training step, including waits."""
        return self.model.demand.samples_per_step / self.score.samples_per_second

    @property
    def usd_per_hour(self) -> float:
        """Price of the whole cluster."""
        return usd_per_hour(self.model.problem)

    @property
    def usd_per_million_tokens(self) -> float:
        """Price of a million trained tokens."""
        return self._usd_per_million(self.usd_per_hour, self.score.samples_per_second)

    @property
    def generation_idle(self) -> float:
        """Share of the generators' time in which they wait for the trainer."""
        return max(0.0, 1 - self.score.samples_per_second / self.score.generated_samples_per_second)

    @property
    def training_idle(self) -> float:
        """Share of the trainer's time in which it waits for samples."""
        busy = self.score.samples_per_second * self.score.training.step_s / self.model.demand.samples_per_step
        return max(0.0, 1 - busy)

    def usd_per_million_of(self, cluster: Alternative) -> float:
        """The same on a cheaper cluster."""
        return self._usd_per_million(cluster.usd_per_hour, cluster.samples_per_second)

    def _usd_per_million(self, usd_an_hour: float, samples_per_second: float) -> float:
        return usd_an_hour / 3600 / (samples_per_second * self.model.demand.completion_tokens) * 1e6


def report_of(model: CostModel, solution: Solution, *, solve_s: float) -> PlanReport:
    """The report of a solution, not simulated and without advice yet."""
    if solution.plan is None or not isinstance(solution.score, Score):
        return PlanReport(model=model, solution=solution, solve_s=solve_s)
    return FeasiblePlan(model=model, solution=solution, solve_s=solve_s, plan=solution.plan, score=solution.score)


_BOTTLENECKS = {
    Limit.TAIL: "the longest samples: they must finish inside their staleness window",
    Limit.SCORING: "scoring: scorers compute as fast as they can; add GPUs to them",
    Limit.REWARD: "rewards: workers score as fast as they can; give them more machines or GPUs",
    Limit.CRITIC: "the critic: it computes as fast as it can; give it more or faster GPUs of one machine",
}


def bottleneck(score: Score) -> str:
    """What to speed up first, in a few words."""
    if (alone := _BOTTLENECKS.get(score.limit)) is not None:
        return alone
    if score.limit is Limit.TRAINING:
        step = score.training
        parts = {
            "computation": step.compute_s,
            "the all-reduce that computation does not hide": step.exposed_allreduce_s,
            "the fixed time of a step": step.overhead_s,
            "the critic on its GPUs": step.critic_s,
        }
        longest = max(parts, key=lambda part: parts[part])
        return f"training: {longest}, {parts[longest]:.3g} s of a step of {step.step_s:.3g} s"
    behind = {each.replicas.node: each.duty for each in score.generation if each.duty < 1}
    if behind:
        slowest = min(behind, key=lambda node: behind[node])
        return f"generation, and links: weights reach {slowest} late, {behind[slowest]:.0%} of its samples are fresh"
    if score.samples_per_second < (generated := score.generated_samples_per_second) / 2:
        share = 1 - score.samples_per_second / generated
        return f"generation: weight updates pause it for {share:.0%} of the time, as steps are so short"
    return "generation: decoding takes all the GPUs it has"


def report_json(report: PlanReport) -> str:
    """As JSON; docs/planning.md describes the keys. Unknown values are null."""
    solution = report.solution
    document: dict[str, object] = {
        "problem": report.model.problem.id,
        "cost_model": report.model.name,
        "solver": solution.solver,
        "solve_s": report.solve_s,
        "num_evaluated": solution.num_evaluated,
        "is_feasible": isinstance(report, FeasiblePlan),
        "is_optimal": solution.is_optimal,
        "reason": report.reason,
        "samples_per_second": solution.score.samples_per_second,
        "upper_bound_samples_per_second": solution.upper_bound_samples_per_second,
        "gap": report.gap,
    }
    if isinstance(report, FeasiblePlan):
        document |= _feasible(report)
    else:
        document |= {"rm1_plan": None, "next_purchases": [], "alternatives": []}
    return json.dumps(document, indent=2)


def _feasible(report: FeasiblePlan) -> dict[str, object]:
    score, step = report.score, report.score.training
    return {
        "rm1_plan": report.plan.stated(),
        "step_s": report.step_s,
        "tokens_per_second": report.tokens_per_second,
        "usd_per_hour": report.usd_per_hour,
        "usd_per_million_tokens": report.usd_per_million_tokens,
        "limit": score.limit.value,
        "bottleneck": bottleneck(score),
        "generation_idle": report.generation_idle,
        "training_idle": report.training_idle,
        "training": {"step_s": step.step_s, **asdict(step)},
        "weights": [asdict(each) for each in weight_routes(report.model, report.plan)],
        "generation": [
            {
                **each.replicas.model_dump(exclude={"batch"}),
                "batch": each.state.batch if each.state else 0,
                "decode_step_s": each.state.step_s if each.state else None,
                "samples_per_second": each.samples_per_second,
                "duty": each.duty,
            }
            for each in score.generation
        ],
        "simulated_samples_per_second": report.simulated_samples_per_second,
        "next_purchases": [asdict(each) for each in report.next_purchases],
        "alternatives": [
            {
                "usd_per_hour": each.usd_per_hour,
                "samples_per_second": each.samples_per_second,
                "usd_per_million_tokens": report.usd_per_million_of(each),
                "machines": dict(each.machines),
                "rm1_plan": each.plan.stated(),
            }
            for each in report.alternatives
        ],
    }
