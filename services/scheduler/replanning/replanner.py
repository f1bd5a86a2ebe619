"""Revises plans of runs in progress: reconsidered when machines or lengths change, changed if that pays.

Checking costs nothing while nothing changes. Solving happens in a thread and takes a few seconds of one core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
from pydantic import ValidationError

from penstock.errors import InvalidFieldError, PenstockError
from penstock.tracing.measuring import measuring
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.plan_message import described, document_of, keep_center
from services.scheduler.planning.plan_wire import PlanTask, plan_task
from services.scheduler.problem.plan_document import PlanDocument, host_classes, node_classes
from services.scheduler.problem.problem import Problem
from services.scheduler.replanning.critic_move import critic_machines, critic_moving_s
from services.scheduler.replanning.environment_wait import environment_wait_s, with_environment_wait
from services.scheduler.replanning.live_problem import Live, live_problem, machines_of, never_came, with_lengths
from services.scheduler.replanning.migration import stopped_share
from services.scheduler.replanning.replan_rule import COOL_DOWN_INTERVALS, Offer, Verdict, cost_of, judge, worth
from services.scheduler.replanning.reward_speed import reward_rates, with_reward_rates
from services.scheduler.replanning.service_speed import Kind, in_words, service_rates, with_service_rates
from services.scheduler.replanning.trainer_move import is_moved, moving_s, not_training
from services.scheduler.replanning.trainer_speed import trainer_speed, with_trainer_speed
from services.scheduler.solvers.interface import TimeLeft, part_of

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
    reward_rates: Mapping[str, float] = field(default_factory=dict)
    """Measured samples per second of a reward worker, by GPU type."""
    service_rates: Mapping[Kind, float] = field(default_factory=dict)
    """Measured tokens per second of scorers and critic."""
    environment_wait_s: float | None = None
    """Measured wait of a session for its environment; None as the problem states it."""
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


@dataclass(frozen=True, slots=True)
class _Look:
    """What a look at a run's plan has to go by."""

    views: Sequence[pb.NodeView]
    time_left: TimeLeft


@dataclass(frozen=True, slots=True)
class _Way:
    """What a search for another plan leaves as it is."""

    keeps_pool: bool
    keeps_critic: bool


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
            run.reward_rates = reward_rates(planned, in_force, views, run_id=run.task.run_id, before=run.reward_rates)
            run.service_rates = service_rates(
                now, in_force, views, run_id=run.task.run_id, before=run.service_rates, slow=run.slow
            )
            run.environment_wait_s = environment_wait_s(planned, views, before=run.environment_wait_s)
            measured = with_environment_wait(
                with_service_rates(with_reward_rates(planned, run.reward_rates), run.service_rates),
                run.environment_wait_s,
            )
            live = live_problem(
                with_trainer_speed(measured, in_force, run.trainer_speed),
                views,
                left=left,
                missing=self._never_came(run, views, now_s),
                growth=run.growth,
                slow_before=run.slow,
                untrained=frozenset() if run.task.keeps_trainers else not_training(views),
            )
            run.slow = live.slow
            if live.problem is None or live.problem == run.looked_at:
                continue
            look = _Look(views, make_budget())
            with measuring("rl.plan.revise", {}, run_id=run.task.run_id) as span:
                plan = await self._look(run, live, live.problem, now_s=now_s, look=look)
                span.attributes["rl.plan.is_revised"] = plan is not None
                span.attributes |= {} if plan is None else described(plan)
            if plan is not None:
                revised.append(plan)
        return revised

    def _never_came(self, run: _Run, views: Sequence[pb.NodeView], now_s: float) -> frozenset[str]:
        # Machines that only train run no `penstock node`, unless that is what starts their trainer.
        in_force = document_of(run.plan) if run.task.keeps_trainers else PlanDocument(gen=(), train=())
        missing = never_came(run.task.problem, in_force, views)
        return missing - run.awaited if now_s - run.begun_s <= self._grace_s else missing

    async def _look(self, run: _Run, live: Live, problem: Problem, *, now_s: float, look: _Look) -> pb.Plan | None:
        run_id, in_force = run.task.run_id, document_of(run.plan)
        kept = live.from_real(in_force)
        # Machines without GPUs register nowhere.
        gone = machines_of(in_force) - set(live.node_ids.values()) - host_classes(problem).keys()
        scales = _Scales(CostModel(problem), live, kept, run.plan, look.views, is_pool_fixed=run.task.keeps_trainers)
        if scales.kept_rate > 0 and not gone and now_s - run.revised_s < self._cool_down_s:
            return None
        machines = critic_machines(live, look.views)
        ways = _ways(in_force, gone, keeps_trainers=run.task.keeps_trainers, moves_critic=bool(machines))
        best: tuple[float, pb.Plan, Verdict] | None = None
        for index, way in enumerate(ways):
            time_left = part_of(look.time_left, 1 / (len(ways) - index))
            start = kept if way.keeps_critic else kept.model_copy(update={"critic": None})
            plan = partial(self._planned, run, problem, critic_machines=machines)
            found = await plan(start, keeps_pool=way.keeps_pool, time_left=time_left)
            if found is not None and (fit := scales.trainable(document_of(found))) is not None:
                found = await plan(fit, keeps_pool=True, time_left=look.time_left)
            if found is None:
                continue
            live.to_real(found)
            offer, obstacle = scales.weighed(found)
            if obstacle:
                verdict = Verdict(False, obstacle)
            elif gone:
                verdict = Verdict(True, f"{self._loss(gone, live.missing)}; {cost_of(offer)}")
            else:
                verdict = judge(offer, rested_s=now_s - run.revised_s, cool_down_s=self._cool_down_s)
            _log.info("plan reconsidered", run_id=run_id, is_revised=verdict.is_revised, reason=verdict.reason)
            if verdict.is_revised and (best is None or worth(offer) > best[0]):
                best = worth(offer), found, verdict
        run.looked_at = problem
        if best is None or self._runs.get(run_id) is not run:
            return None
        _, found, verdict = best
        keep_center(found, run.plan)
        found.explanation = f"revised: {verdict.reason}. {_news(run, live, found)}{found.explanation}"
        run.plan, run.revised_s = found, now_s
        return found

    async def _planned(
        self,
        run: _Run,
        problem: Problem,
        kept: PlanDocument,
        *,
        keeps_pool: bool,
        time_left: TimeLeft,
        critic_machines: frozenset[str],
    ) -> pb.Plan | None:
        """A plan for the live problem, in its names; None if there is none."""
        task = replace(run.task, problem=problem)
        try:
            return await asyncio.to_thread(
                plan_task,
                task,
                time_left=time_left,
                start=kept,
                keeps_pool=keeps_pool,
                critic_machines=critic_machines,
            )
        except PenstockError as error:
            # Until something changes: solving the same problem again would waste a core.
            _log.warning("the plan cannot be revised", run_id=run.task.run_id, reason=str(error))
            return None

    def _loss(self, gone: frozenset[str], missing: frozenset[str]) -> str:
        """Why machines of the plan in force are gone."""
        reasons = {
            "not there any more": gone - missing,
            f"not registered within {self._grace_s:.0f} s": gone & missing,
        }
        return "; ".join(f"{_named(who)} of the plan in force: {why}" for why, who in reasons.items() if who)


@dataclass(frozen=True, slots=True)
class _Scales:
    """Weighs plans against the one in force."""

    model: CostModel
    live: Live
    kept: PlanDocument
    """The plan in force without the machines that are gone, in the live problem's names."""
    in_force: pb.Plan
    views: Sequence[pb.NodeView]
    is_pool_fixed: bool
    """Whether the trainer is managed elsewhere, so that the plan only follows it."""

    @property
    def kept_rate(self) -> float:
        """Samples per second of the plan in force; 0 if it can no longer run."""
        return self.model.score(self.kept).samples_per_second

    def trainable(self, plan: PlanDocument) -> PlanDocument | None:
        """A plan in the live problem's names without the machines that do not train; None if it has no others, or none.

        The cost model expects next to nothing of their GPUs, but as much memory as of others.
        """
        untrained = frozenset() if self.is_pool_fixed else not_training(self.views)
        pool = [share for share in plan.train if self.live.node_ids.get(share.node, share.node) not in untrained]
        if not pool or len(pool) == len(plan.train):
            return None
        return plan.model_copy(update={"train": tuple(pool)})

    def weighed(self, found: pb.Plan) -> tuple[Offer, str]:
        """A plan over real machines as an offer, and why it cannot be carried out; empty if it can."""
        before, after = document_of(self.in_force), document_of(found)
        new = self.live.from_real(after)
        migration_s, obstacle = self.live.migration_s, ""
        is_pool_moved = not self.is_pool_fixed and is_moved(before, after)
        if is_pool_moved:
            migration_s = max(migration_s, moving_s(self.model.problem, self.kept, new, self.views))
            if wrong := not_training(self.views) & {share.node for share in after.train}:
                obstacle = (
                    f"{_named(wrong)} would train and cannot: the machine's file has no section trainer, or the "
                    "machine does not share the run's folder, as the log of `penstock node` there says"
                )
        is_critic_moved = before.critic != after.critic
        if is_critic_moved and new.critic is not None:
            migration_s = max(migration_s, critic_moving_s(self.model, new.critic, self.views))
        offer = Offer(
            rate=self.model.score(new).samples_per_second,
            kept_rate=self.kept_rate,
            num_gpus=_num_gpus(new),
            num_kept_gpus=_num_gpus(self.kept),
            migration_s=migration_s,
            moved_share=stopped_share(self.in_force, found),
            is_pool_moved=is_pool_moved,
            is_critic_moved=is_critic_moved,
        )
        return offer, obstacle


def _ways(in_force: PlanDocument, gone: Collection[str], *, keeps_trainers: bool, moves_critic: bool) -> list[_Way]:
    """Where pool and critic may move, moving them competes with planning only generators."""
    is_pool_there = not {*gone} & {share.node for share in in_force.train}
    pools = [True] if is_pool_there and keeps_trainers else [False, *([True] * is_pool_there)]
    if in_force.critic is None or not moves_critic:
        return [_Way(pool, keeps_critic=True) for pool in pools]
    if in_force.critic.node in gone:
        return [_Way(pool, keeps_critic=False) for pool in pools]
    return [*(_Way(pool, keeps_critic=True) for pool in pools), _Way(pools[0], keeps_critic=False)]


def running_plan(plan: pb.Plan) -> PlanDocument:
    """The plan that a client says its run follows. Raises InvalidFieldError."""
    try:
        return document_of(plan)
    except ValidationError as error:
        raise InvalidFieldError(
            f"running_plan: is no plan ({error.errors()[0]['msg']}); send one that WatchPlan returned",
            field="running_plan",
        ) from error


def _news(run: _Run, live: Live, found: pb.Plan) -> str:
    """What else is to be said of a revision, each a sentence with a space behind it."""
    come = machines_of(document_of(found)) - machines_of(document_of(run.plan))
    news = f"{_named(come)} now used. " if come else ""
    slow = [f"{name} at {share:.0%}" for name, share in sorted(live.slow.items())[:_MAX_NAMED]]
    news += f"slower than machines like it or than it should be: {', '.join(slow)}. " if slow else ""
    if run.trainer_speed != 1.0:
        news += f"Trainers reach {run.trainer_speed:.0%} of the speed that the cost model expects. "
    if run.reward_rates:
        each = (f"{rate:g} samples/s beside {gpu}" for gpu, rate in sorted(run.reward_rates.items()))
        news += f"A reward worker scores {', '.join(each)}. "
    if run.environment_wait_s is not None:
        news += f"A session waits {run.environment_wait_s:g} s for its environment. "
    return news + in_words(run.service_rates)


def _named(machines: Collection[str]) -> str:
    num_more = len(machines) - _MAX_NAMED
    return ", ".join(sorted(machines)[:_MAX_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")


def _num_gpus(plan: PlanDocument) -> int:
    return sum(gpus for _, _, gpus in plan.places())
