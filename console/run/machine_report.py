"""Reports this machine to the scheduler's inventory during a run: its hardware and its measured rates.

The scheduler advises; a run continues without it.
"""

from __future__ import annotations

import os
import platform

import structlog

from console.config.config import RunConfig
from console.config.derive import Addresses
from console.node.scoring import REWARD
from console.node.service_rates import ServiceMeter
from console.view.run_view import SAMPLES_PER_SECOND, STEP_S, TOKENS_PER_SECOND, RunView
from penstock.clients.scheduler.inventory import report_node, this_machine
from penstock.errors import PenstockError
from penstock.process.tasks import race
from penstock.security import Security
from penstock.v1 import scheduler_pb2

EMULATED = "emulated"
_log = structlog.get_logger()


async def report_machine(config: RunConfig, addresses: Addresses, view: RunView, security: Security) -> None:
    """Register this machine with the run's scheduler and report its measured rates until cancelled."""
    roles = local_roles(addresses)
    if not roles:
        return
    node_id = f"{platform.node() or 'local'}-{os.getpid()}"
    node = this_machine(node_id=node_id, site=config.site, roles=roles)
    target = addresses.scheduler.target
    run_id = config.run.id if config.scheduler.problem is not None else ""
    rewards = {addresses.reward.target: REWARD} if run_id and addresses.reward.is_local else {}
    meter = ServiceMeter(run_id, lambda: rewards, security=security)

    def measure() -> list[scheduler_pb2.MeasuredRate]:
        rewards_here = [] if _is_emulated(view) else meter.rates()
        return measured_rates(view, roles) + run_rates(view, run_id) + rewards_here

    try:
        await race(report_node(target, node, measure=measure, security=security), meter.keep_asking())
    except PenstockError as error:
        _log.warning("this machine is not reported to the scheduler", scheduler=target, error=str(error))


def local_roles(addresses: Addresses) -> list[scheduler_pb2.Role.ValueType]:
    """The roles of this machine in the run."""
    parts = (
        (scheduler_pb2.ROLE_BROKER, addresses.broker.is_local),
        (scheduler_pb2.ROLE_GENERATOR, any(endpoint.is_local for endpoint in addresses.generators)),
        (scheduler_pb2.ROLE_REWARD, addresses.reward.is_local),
        (scheduler_pb2.ROLE_TRAINER, addresses.trainer.is_local),
    )
    return [role for role, is_local in parts if is_local]


def measured_rates(view: RunView, roles: list[scheduler_pb2.Role.ValueType]) -> list[scheduler_pb2.MeasuredRate]:
    """The newest rates of the generators and of the trainer, if they are here and have been measured."""
    rates = []
    if scheduler_pb2.ROLE_GENERATOR in roles and view.run is not None:
        tokens = sum(generator.beat.tokens_per_second for generator in view.run.generators)
        rates.append(scheduler_pb2.MeasuredRate(role=scheduler_pb2.ROLE_GENERATOR, tokens_per_second=tokens))
    if scheduler_pb2.ROLE_TRAINER in roles and view.step is not None:
        get = view.step.get
        rate = scheduler_pb2.MeasuredRate(
            role=scheduler_pb2.ROLE_TRAINER,
            tokens_per_second=get(TOKENS_PER_SECOND) or 0.0,
            samples_per_second=get(SAMPLES_PER_SECOND) or 0.0,
        )
        rate.window.FromMilliseconds(int(1000 * (get(STEP_S) or 0.0)))
        rates.append(rate)
    return rates


def run_rates(view: RunView, run_id: str) -> list[scheduler_pb2.MeasuredRate]:
    """How fast all trainers of a run together are while they compute, for the run's plan; empty without a plan.

    Emulated generators stand for GPUs that the run does not have: its trainer's real speed says nothing about those of
    the plan.
    """
    samples_per_second = view.computing_samples_per_second
    if not run_id or not samples_per_second or not _engines(view) or _is_emulated(view):
        return []
    return [
        scheduler_pb2.MeasuredRate(
            role=scheduler_pb2.ROLE_TRAINER, samples_per_second=samples_per_second, run_id=run_id
        )
    ]


def _engines(view: RunView) -> set[str]:
    return {generator.hello.engine for generator in view.run.generators} if view.run is not None else set()


def _is_emulated(view: RunView) -> bool:
    """Whether the plan's seconds are not real ones."""
    return EMULATED in _engines(view)
