"""Sets of a run what its first plan places: the trainer's mesh, scorers, critic, reward workers, broker, scheduler."""

from __future__ import annotations

from console.config.config import RunConfig
from console.deploy.trainers import mesh_settings
from penstock.config import ConfigError, validate
from services.scheduler.problem.plan_document import (
    PlanDocument,
    host_classes,
    node_classes,
    placement_error,
    read_plan,
)
from services.scheduler.problem.problem import read_problem
from services.trainer.run_sections import ComputeConfig


def as_planned(config: RunConfig) -> RunConfig:
    """The run without the services that machines of its plan start, and with the plan's mesh. Raises ConfigError."""
    if config.scheduler.plan is None:
        return config
    plan = read_plan(config.scheduler.plan)
    _check_machines(config, plan)
    for service, machine in _apart(plan).items():
        if getattr(config.endpoints, service) is None:
            raise ConfigError(
                f"endpoints.{service}: unset, and {config.scheduler.plan} has the {service} on {machine}; name its "
                f"address there, or plan again without that machine"
            )
    if plan.score:
        config = config.model_copy(update={"scorers": 0})
    if plan.reward_gpus or (plan.reward and plan.train and plan.train[0].node not in plan.reward):
        config = config.model_copy(update={"rewards": 0})
    if plan.critic is not None and config.starts_critic:
        raise ConfigError(
            f"endpoints.critic: unset, and {config.scheduler.plan} has a critic on {plan.critic.node}; name its "
            "address there, or take it out of the plan, and the run starts one"
        )
    # A trainer that moves takes the mesh of the plan in force, whenever it starts.
    return config if config.moves_trainer else _with_mesh(config)


def _check_machines(config: RunConfig, plan: PlanDocument) -> None:
    """Raise ConfigError for a plan of other machines than the problem's."""
    problem = config.scheduler.problem
    # That it is there is checked with everything else that the run reads.
    if problem is None or not problem.is_file():
        return
    stated = read_problem(problem)
    if (reason := placement_error(plan, node_classes(stated), host_classes(stated))) is not None:
        raise ConfigError(
            f"scheduler.plan: {config.scheduler.plan}: {reason} in {problem}; name the problem that it was planned "
            "for, or plan again"
        )


def elsewhere(config: RunConfig) -> dict[str, str]:
    """Addresses of broker and scheduler where the plan has them on a machine of their own, which starts them itself.

    They come up with the run, not before it. Raises ConfigError if the plan cannot be read.
    """
    if config.scheduler.plan is None:
        return {}
    apart = _apart(read_plan(config.scheduler.plan))
    return {service: target for service in apart if (target := getattr(config.endpoints, service)) is not None}


def _apart(plan: PlanDocument) -> dict[str, str]:
    """Machines of broker and scheduler that are not the head."""
    if not plan.train:
        return {}
    return {service: machine for service, machine in plan.center.items() if machine != plan.train[0].node}


def _with_mesh(config: RunConfig) -> RunConfig:
    """The run with `trainer.processes`, `parallel` and `offload` as `scheduler.plan` states them.

    Without a plan, or one without a mesh, the run itself; also where only generators follow the plan, because they are
    emulated beside a trainer on real GPUs. Raises ConfigError if the run states another mesh of its own.
    """
    path, trainer = config.scheduler.plan, config.trainer
    if path is None or (config.generator.engine == "emulated" and trainer.device != "cpu"):
        return config
    plan = read_plan(path)
    if plan.mesh is None:
        return config
    planned = validate(
        ComputeConfig, {**trainer.model_dump(exclude_unset=True), **mesh_settings(plan)}, source=str(path)
    )
    for name in ("processes", "parallel", "offload"):
        wanted, stated = getattr(planned, name), getattr(trainer, name)
        if name in trainer.model_fields_set and wanted != stated:
            raise ConfigError(f"trainer.{name}: {stated}, and {path} plans {wanted}; leave it out, or plan again")
    return config.model_copy(update={"trainer": planned})
