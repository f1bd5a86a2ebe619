"""Puts the processes of a run's trainer into the mesh of the plan that the run begins with."""

from __future__ import annotations

from console.config.config import RunConfig
from console.deploy.trainers import mesh_settings
from penstock.config import ConfigError, validate
from services.scheduler.problem.plan_document import read_plan
from services.trainer.run_sections import ComputeConfig


def with_planned_mesh(config: RunConfig) -> RunConfig:
    """The run with `trainer.processes` and `trainer.parallel` as `scheduler.plan` states them.

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
    for name in ("processes", "parallel"):
        wanted, stated = getattr(planned, name), getattr(trainer, name)
        if name in trainer.model_fields_set and wanted != stated:
            raise ConfigError(f"trainer.{name}: {stated}, and {path} plans {wanted}; leave it out, or plan again")
    return config.model_copy(update={"trainer": planned})
