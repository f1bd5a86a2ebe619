"""Places what no solver does: broker, Redis and scheduler, and the relay of each site; and says what its link carries.

The rules, by which no rate changes:

- Broker, Redis and scheduler stand on the first machine without GPUs in the head's region, where they take nothing
  from a trainer and stay when the trainer moves; without one on the head. There as many brokers share a Redis as the
  tokens of the plan keep busy.
- At every other site that generates, weights come to the machine with the fastest network card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.cost_model.reward import CORES_OF_REDIS
from services.scheduler.problem.plan_document import Broker, PlanDocument, Relay, host_classes, node_classes
from services.scheduler.problem.problem import Problem

TOKENS_PER_BROKER = 48_000
"""Completion tokens per second with which a broker is busy for 70 % of a core, by what was measured of its token stream
(docs/benchmarks.md: 14.5 % for 10,000)."""
MAX_BROKERS = 8
"""As many as were measured on one Redis (docs/scale.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRoute:
    """What brings each new version to the generators of one site."""

    from_site: str
    """The head's."""
    to_site: str
    relay: str | None
    """Machine that fetches for its site; None at the head's, and where the plan names none: the first that asks."""
    copies: int
    """Copies of a version that travel: one to another site, one for each replica of the head's."""
    bytes_per_version: float
    """Of one copy of a whole version; deltas are smaller."""
    seconds: float | None
    """Until all copies are there, by the slowest of the link and the machines' network cards; None where the problem
    has no link."""


def without_places(plan: PlanDocument) -> PlanDocument:
    """What solvers see of a plan."""
    return plan.model_copy(update={"broker": None, "scheduler": None, "relay": ()})


def with_center(
    problem: Problem, plan: PlanDocument, before: PlanDocument | None, *, tokens_per_second: float = 0.0
) -> PlanDocument:
    """The plan with machines for broker and scheduler: those of the plan `before`, where it states some.

    Args:
        problem: What is planned for.
        plan: Who trains and who generates.
        before: The plan that it starts from.
        tokens_per_second: Completion tokens that it reaches.
    """
    head, hosts = plan.train[0].node, host_classes(problem)
    place = center_place(problem, head)
    broker, scheduler = (None, None) if before is None else (before.broker, before.scheduler)
    cores = MAX_BROKERS + CORES_OF_REDIS
    if place == head:
        # Beside a trainer the run's console starts one.
        cores = 1
    elif (stated := hosts[place].cores) is not None:
        work = problem.workload.reward
        cores = stated - (work.cores if work is not None and place in plan.reward else 0)
    most = min(MAX_BROKERS, cores - CORES_OF_REDIS)
    wanted = max(1, min(most, math.ceil(tokens_per_second / TOKENS_PER_BROKER)))
    broker = broker or Broker(node=place, count=wanted)
    return plan.model_copy(update={"broker": broker, "scheduler": scheduler or place})


def center_place(problem: Problem, head: str) -> str:
    """Where broker, Redis and scheduler stand by the rule."""
    region = node_classes(problem)[head].region
    return next((name for name, host in host_classes(problem).items() if host.region == region), head)


def with_relays(problem: Problem, plan: PlanDocument) -> PlanDocument:
    """The plan with a relay at each site that generates and is not the head's."""
    machines = node_classes(problem)
    home = machines[plan.train[0].node].region
    best: dict[str, str] = {}
    for each in plan.gen:
        site = machines[each.node].region
        if site != home and (site not in best or machines[each.node].nic_Gbps > machines[best[site]].nic_Gbps):
            best[site] = each.node
    return plan.model_copy(update={"relay": tuple(Relay(site=site, node=name) for site, name in best.items())})


def weight_routes(model: CostModel, plan: PlanDocument) -> list[WeightRoute]:
    """How weights reach every site that generates, the head's first."""
    machines = model.nodes
    head = machines[plan.train[0].node]
    relays = {each.site: each.node for each in plan.relay}
    replicas: dict[str, int] = {}
    for each in plan.gen:
        site = machines[each.node].region
        replicas[site] = replicas.get(site, 0) + each.count
    routes = []
    for site in sorted(replicas, key=lambda site: site != head.region):
        relay, is_far = relays.get(site), site != head.region
        copies = 1 if is_far else replicas[site]
        rates = [head.nic_Gbps * 1e9 / 8]
        if relay is not None:
            rates.append(machines[relay].nic_Gbps * 1e9 / 8)
        if is_far:
            rates.append(model.network.bytes_per_second(head.region, site))
        latency_s = model.network.latency_s(head.region, site) if is_far else 0.0
        num_bytes = model.demand.weight_bytes
        routes.append(
            WeightRoute(
                from_site=head.region,
                to_site=site,
                relay=relay,
                copies=copies,
                bytes_per_version=num_bytes,
                seconds=copies * num_bytes / min(rates) + latency_s if min(rates) > 0 else None,
            )
        )
    return routes
