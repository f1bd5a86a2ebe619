"""Manages the plan of a run: requests, watches, reports and saves it, across restarts of the scheduler.

`penstock node` on each machine carries it out; the trainer stays where it is unless `endpoints.trainer` names several
machines. Without a scheduler the run continues unchanged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import aclosing
from pathlib import Path

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from console.config.config import RunConfig
from console.deploy.trainers import mesh_settings
from penstock.clients.scheduler.plans import watch_plan
from penstock.config import ConfigError, Document, read_document
from penstock.errors import InvalidFieldError, PenstockError
from penstock.network.outage import Outage
from penstock.network.rpc import call_with_retry, open_channel
from penstock.security import Security
from penstock.v1 import scheduler_pb2 as pb
from penstock.v1 import scheduler_pb2_grpc
from services.scheduler.planning.plan_message import document_of, put_services, put_trainers
from services.scheduler.problem.plan_document import PlanDocument, read_plan

BUDGET_S = 10.0
_SLACK_S = 20.0
_EQUAL_WITHIN = 0.01


class RunPlan:
    """The plan of one run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        problem: Path,
        scheduler: str,
        history: Path,
        security: Security,
        note: Callable[[str], None],
    ) -> None:
        self._run_id = config.run.id
        self._patience_s = config.run.patience_s
        self._moves_trainers = config.moves_trainer
        self._problem_json = json.dumps(read_document(problem))
        self._scheduler = scheduler
        self._history = history
        self._security = security
        self._note = note
        self._plan: pb.Plan | None = None
        """The plan in force."""
        self._begin = newest_plan(history) if self._moves_trainers else None
        if self._begin is None and config.scheduler.plan is not None:
            self._begin = as_message(read_plan(config.scheduler.plan))

    @property
    def trainer(self) -> Document:
        """`processes` and `parallel` of `trainer` by the plan in force; empty where it does not place the trainer."""
        return trainer_settings(self._plan) if self._moves_trainers and self._plan is not None else {}

    async def create(self) -> None:
        """Request a plan. Raises ConfigError if the problem is wrong, PenstockError if no plan can run."""
        try:
            self._take(await self._request(give_up_after_s=self._patience_s))
        except InvalidFieldError as error:
            raise ConfigError(f"scheduler.problem: {error}") from error

    async def follow(self) -> None:
        """Take in revisions until cancelled; a scheduler that has forgotten the plan is sent it again."""
        plans = watch_plan(self._scheduler, self._run_id, security=self._security)
        async with aclosing(plans):
            async for plan in plans:
                if plan is not None:
                    self._take(plan)
                    continue
                try:
                    await self._request(give_up_after_s=0.0)
                except PenstockError as error:
                    self._note(f"plan: the scheduler does not make one again: {error}")

    async def _request(self, *, give_up_after_s: float | None) -> pb.Plan:
        request = pb.CreatePlanRequest(
            run_id=self._run_id, problem_json=self._problem_json, keeps_trainers=not self._moves_trainers
        )
        request.budget.FromMilliseconds(int(BUDGET_S * 1000))
        if (running := self._plan or self._begin) is not None:
            request.running_plan.CopyFrom(running)
        peer = f"scheduler {self._scheduler}"
        async with open_channel(self._scheduler, self._security) as channel:
            answer = await call_with_retry(
                scheduler_pb2_grpc.SchedulerServiceStub(channel).CreatePlan,
                request,
                peer=peer,
                timeout_s=BUDGET_S + _SLACK_S,
                give_up_after_s=give_up_after_s,
                outage=Outage(peer, on_notice=lambda text: self._note(text or f"{peer} is back")),
            )
        return answer.plan

    def _take(self, plan: pb.Plan) -> None:
        before, self._plan = self._plan, plan
        if before is not None and before == plan:
            return
        with self._history.open("a", encoding="utf-8") as history:
            history.write(json.dumps(MessageToDict(plan, preserving_proto_field_name=True)) + "\n")
        self._note(f"plan {plan.revision}: {summary(plan)}. {plan.explanation}")
        if before is None or _trainers(before) == _trainers(plan):
            return
        if self._moves_trainers:
            self._note(f"plan {plan.revision} moves the trainer to {_named(_trainers(plan))}: it writes a checkpoint")
        else:
            self._note(
                f"plan {plan.revision} trains on {_named(_trainers(plan))}, which cannot change while the run "
                "continues: stop it, and resume it there"
            )


def newest_plan(history: Path) -> pb.Plan | None:
    """The plan that a resumed run followed last; None if it followed none, or the file cannot be read."""
    try:
        lines = history.read_text(encoding="utf-8").splitlines()
        return ParseDict(json.loads(lines[-1]), pb.Plan(), ignore_unknown_fields=True) if lines else None
    except (OSError, ValueError, ParseError):
        return None


def as_message(plan: PlanDocument) -> pb.Plan:
    """A plan document in the form that the scheduler accepts as a running plan."""
    message = pb.Plan()
    put_trainers(message, plan)
    for each in plan.gen:
        message.assignments.add(
            node_id=each.node,
            role=pb.ROLE_GENERATOR,
            tensor_parallel=each.tp,
            pipeline_parallel=each.pp if each.pp > 1 else 0,
            num_replicas=each.count,
            num_concurrent_samples=each.batch or 0,
        )
    taken = Counter[str]()
    for _, node, gpus in PlanDocument(train=plan.train, gen=plan.gen).places():
        taken[node] += gpus
    put_services(message, plan, taken)
    return message


def summary(plan: pb.Plan) -> str:
    """Summary of which machines generate and which train."""
    generators = {each.node_id for each in plan.assignments if each.role == pb.ROLE_GENERATOR}
    return f"{_named(generators) or 'none'} generate, {_named(_trainers(plan))} train"


def trainer_settings(plan: pb.Plan) -> Document:
    """`processes` and `parallel` of `trainer` by a plan."""
    document = document_of(plan)
    if document.mesh is None:
        return {"processes": processes(plan), "parallel": {}}
    return mesh_settings(document)


def processes(plan: pb.Plan) -> int | tuple[float, ...]:
    """`trainer.processes` by a plan: one for each GPU that trains; where GPUs differ, with its share of tokens."""
    pool = [each for each in plan.assignments if each.role == pb.ROLE_TRAINER]
    shares = [each.share / len(each.accelerator_indices) for each in pool for _ in each.accelerator_indices]
    if min(shares) <= 0 or max(shares) / min(shares) < 1 + _EQUAL_WITHIN:
        return len(shares)
    return tuple(round(share / max(shares), 3) for share in shares)


def _trainers(plan: pb.Plan) -> dict[str, tuple[int, ...]]:
    """GPUs that train, by machine."""
    pool = (each for each in plan.assignments if each.role == pb.ROLE_TRAINER)
    return {each.node_id: tuple(each.accelerator_indices) for each in pool}


def _named(machines: Iterable[str]) -> str:
    return ", ".join(sorted(machines))
