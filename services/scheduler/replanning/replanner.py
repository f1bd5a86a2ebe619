"""Revises plans of runs in progress: reconsidered when machines or lengths change, changed if that pays.

Checking costs nothing while nothing changes. Solving happens in a thread and takes a few seconds of one core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog
from pydantic import ValidationError

from penstock.errors import InvalidFieldError, PenstockError
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.plan_wire import PlanTask, plan_task
from services.scheduler.problem.plan_document import PlanDocument, Replicas, TrainShare, node_classes
from services.scheduler.problem.problem import Problem
from services.scheduler.replanning.live_problem import Live, live_problem, machines_of, never_came, with_lengths
from services.scheduler.replanning.migration import stopped_share
from services.scheduler.replanning.replan_rule import COOL_DOWN_INTERVALS, Offer, Verdict, cost_of, judge
from services.scheduler.replanning.trainer_speed import trainer_speed, with_trainer_speed
from services.scheduler.solvers.interface import TimeLeft

LOOK_EVERY_S = 5.0
GRACE_INTERVALS = 60
"""Reports for which a machine that has not registered counts as present: 5 min at one report every 5 s. Operators start
machines site by site, and images may have to be fetched first."""
MIN_LENGTHS = 256
"""Completions to observe before their lengths count."""
_RECENT = 2048
_MAX_NAMED = 8

_log = structlog.get_logger()


@dataclass(slots=True)
class _Run:
    """The inputs of a run's plan."""

    task: PlanTask
    plan: pb.Plan
    begun_s: float
    """When the run was first planned."""
    awaited: frozenset[str]
    """Machines that count as present for a while although they have not registered."""
    revised_s: float
    slow: Mapping[str, float] = field(default_factory=dict)
    """Machines planned as slower ones, as in Live."""
    trainer_speed: float = 1.0
    """Measured over computed rate of the GPUs that train."""
    num_lengths: int = 0
    mean_tokens: float = 0.0
    looked_at: Problem | None = field(default=None)
    """The live problem that the plan in force was last judged on."""

    @property
    def growth(self) -> float:
        """Observed mean length over the stated one, in tenths."""
        if self.num_lengths < MIN_LENGTHS:
            return 1.0
        return max(0.1, round(self.mean_tokens / demand_of(self.task.problem).completion_tokens, 1))


class Replanner:
    """Keeps the plan of each run current; see the module. `heartbeat_interval_s` is how often machines report."""

    def __init__(self, *, heartbeat_interval_s: float) -> None:
        self._runs: dict[str, _Run] = {}
        self._cool_down_s = COOL_DOWN_INTERVALS * heartbeat_interval_s
        self._grace_s = GRACE_INTERVALS * heartbeat_interval_s

    def follow(self, task: PlanTask, plan: pb.Plan, *, running: PlanDocument | None, now_s: float) -> None:
        """Follow a run whose plan was solved for; its former plan is forgotten.

        A `running` plan was in force before this scheduler knew it: only its machines are awaited, and those that
        joined since are used at once.
        """
        awaited = frozenset(node_classes(task.problem)) if running is None else machines_of(running)
        revised_s = now_s if running is None else now_s - self._cool_down_s
        looked_at = task.problem if running is None else None
        self._runs[task.run_id] = _Run(task, plan, now_s, awaited, revised_s, looked_at=looked_at)

    def forget(self, run_id: str) -> None:
        """Stop following a run."""
        self._runs.pop(run_id, None)

    def observe_lengths(self, run_id: str, lengths: Sequence[int]) -> None:
        """Take in the lengths of completions, in tokens."""
        if (run := self._runs.get(run_id)) is not None:
            for length in lengths:
                run.num_lengths += 1
                run.mean_tokens += (length - run.mean_tokens) / min(run.num_lengths, _RECENT)

    async def revise(
        self, views: Sequence[pb.NodeView], *, left: frozenset[str], now_s: float, make_budget: Callable[[], TimeLeft]
    ) -> list[pb.Plan]:
        """The revised plans that take effect now, without revision number and time."""
        revised = []
        for run in list(self._runs.values()):
            planned, in_force = run.task.problem, document_of(run.plan)
            # Measured in samples, so longer ones must not be taken for slower trainers.
            now = with_lengths(planned, run.growth)
            run.trainer_speed = trainer_speed(now, in_force, views, run_id=run.task.run_id, before=run.trainer_speed)
            live = live_problem(
                with_trainer_speed(planned, in_force, run.trainer_speed),
                views,
                left=left,
                missing=self._never_came(run, views, now_s),
                growth=run.growth,
                slow_before=run.slow,
            )
            run.slow = live.slow
            if live.problem is None or live.problem == run.looked_at:
                continue
            plan = await self._look(run, live, live.problem, now_s=now_s, time_left=make_budget())
            if plan is not None:
                revised.append(plan)
        return revised

    def _never_came(self, run: _Run, views: Sequence[pb.NodeView], now_s: float) -> frozenset[str]:
        missing = never_came(run.task.problem, document_of(run.plan), views)
        return missing - run.awaited if now_s - run.begun_s <= self._grace_s else missing

    async def _look(
        self, run: _Run, live: Live, problem: Problem, *, now_s: float, time_left: TimeLeft
    ) -> pb.Plan | None:
        run_id, in_force = run.task.run_id, document_of(run.plan)
        kept = live.from_real(in_force)
        model = CostModel(problem)
        kept_rate = model.score(kept).samples_per_second
        gone = machines_of(in_force) - set(live.node_ids.values())
        is_pool_there = not gone & {share.node for share in in_force.train}
        if kept_rate > 0 and not gone and now_s - run.revised_s < self._cool_down_s:
            return None
        try:
            found = await asyncio.to_thread(
                plan_task,
                replace(run.task, problem=problem),
                time_left=time_left,
                start=kept,
                is_running=is_pool_there,
            )
        except PenstockError as error:
            # Until something changes: solving the same problem again would waste a core.
            run.looked_at = problem
            _log.warning("the plan cannot be revised", run_id=run_id, reason=str(error))
            return None
        new = document_of(found)
        live.to_real(found)
        offer = Offer(
            rate=model.score(new).samples_per_second,
            kept_rate=kept_rate,
            num_gpus=_num_gpus(new),
            num_kept_gpus=_num_gpus(kept),
            migration_s=live.migration_s,
            moved_share=stopped_share(run.plan, found),
        )
        if gone:
            verdict = Verdict(True, f"{self._loss(gone, live.missing)}; {cost_of(offer)}")
        else:
            verdict = judge(offer, rested_s=now_s - run.revised_s, cool_down_s=self._cool_down_s)
        run.looked_at = problem
        _log.info("plan reconsidered", run_id=run_id, is_revised=verdict.is_revised, reason=verdict.reason)
        if not verdict.is_revised or self._runs.get(run_id) is not run:
            return None
        come = machines_of(document_of(found)) - machines_of(in_force)
        news = f"{_named(come)} now used. " if come else ""
        slow = [f"{name} at {share:.0%}" for name, share in sorted(live.slow.items())[:_MAX_NAMED]]
        news += f"slower than machines like it or than it should be: {', '.join(slow)}. " if slow else ""
        if run.trainer_speed != 1.0:
            news += f"Trainers reach {run.trainer_speed:.0%} of the speed that the cost model expects. "
        found.explanation = f"revised: {verdict.reason}. {news}{found.explanation}"
        run.plan, run.revised_s = found, now_s
        return found

    def _loss(self, gone: frozenset[str], missing: frozenset[str]) -> str:
        """Why machines of the plan in force are gone."""
        reasons = {
            "not there any more": gone - missing,
            f"not registered within {self._grace_s:.0f} s": gone & missing,
        }
        return "; ".join(f"{_named(who)} of the plan in force: {why}" for why, who in reasons.items() if who)


def running_plan(plan: pb.Plan) -> PlanDocument:
    """The plan that a client says its run follows. Raises InvalidFieldError."""
    try:
        return document_of(plan)
    except ValidationError as error:
        raise InvalidFieldError(
            f"running_plan: is no plan ({error.errors()[0]['msg']}); send one that WatchPlan returned",
            field="running_plan",
        ) from error


def document_of(plan: pb.Plan) -> PlanDocument:
    """The generators and trainers of a plan on the wire."""
    gen = [
        Replicas(node=each.node_id, tp=each.tensor_parallel or 1, count=each.num_replicas or 1)
        for each in plan.assignments
        if each.role == pb.ROLE_GENERATOR
    ]
    train = [
        TrainShare(node=each.node_id, gpus=len(each.accelerator_indices))
        for each in plan.assignments
        if each.role == pb.ROLE_TRAINER
    ]
    return PlanDocument(gen=tuple(gen), train=tuple(train))


def _named(machines: Collection[str]) -> str:
    num_more = len(machines) - _MAX_NAMED
    return ", ".join(sorted(machines)[:_MAX_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")


def _num_gpus(plan: PlanDocument) -> int:
    return sum(each.tp * each.count for each in plan.gen) + sum(share.gpus for share in plan.train)
