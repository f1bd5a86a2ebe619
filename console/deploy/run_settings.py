"""Settings of a deployed run: those that its plan was computed for, with paths that mean the same on every machine."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from pathlib import PurePath
from typing import Any

from console.config.data_section import canary_files, data_files
from console.deploy.description import Layout
from console.deploy.nodes import emulation
from console.deploy.trainers import moving_section, trainer_section
from penstock.config import ConfigError, Document
from penstock.storage.addresses import looks_like_address
from services.generator.engines.registry import DEFAULT_ENGINE, ENGINES
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import CriticPlace, PlanDocument, host_classes, node_classes
from services.scheduler.problem.problem import Problem

DATA = PurePath("/data")
"""Model and data as containers see them."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_critic(config: Document, place: CriticPlace, layout: Layout, *, moves: bool) -> None:
    """Raise ConfigError for a run that cannot have the plan's critic; where trainers move, a pod may have both."""
    stated = config["endpoints"].get("critic")
    if stated is not None:
        raise ConfigError(f"endpoints.critic: {stated}, and the plan has a critic on {place.node}; leave it out")
    if config["algorithm"]["critic"] != "service":
        raise ConfigError(
            "algorithm.critic: trainer, and the plan has a critic; set it to service, or is_service of the "
            "problem's tasks to false and plan again"
        )
    if place.is_beside_trainer and not layout.names_gpus and not moves:
        raise ConfigError(
            f"critic.is_beside_trainer: pods share no GPUs, and the critic is on those that train on {place.node}; "
            "give it others in the plan, or deploy --for compose or slurm"
        )


def check_names(problem: Problem) -> None:
    """Raise ConfigError for machines and regions that cannot name hosts and folders."""
    entries = [
        *((f"nodes.{index}", node.name, node.region) for index, node in enumerate(problem.nodes)),
        *((f"hosts.{index}", host.name, host.region) for index, host in enumerate(problem.hosts)),
    ]
    for field, name, region in entries:
        for key, value in (("name", name), ("region", region)):
            if not _HOST.fullmatch(value):
                raise ConfigError(
                    f"{field}.{key}: {value!r} cannot name a {'machine' if key == 'name' else 'folder'} of a "
                    "deployment; use letters, digits, dots, dashes and underscores"
                )


def check_moves(run: Document) -> None:
    """Raise ConfigError for a deployment whose trainer cannot move."""
    if run.get("run", {}).get("checkpoint_storage") is None:
        raise ConfigError(
            "run.checkpoint_storage: --moves-trainer needs it, since machines share no folder; name an address in "
            "object storage (s3://, gs://, file://) that all of them read and write"
        )


def check_center(problem: Problem, plan: PlanDocument) -> None:
    """Raise ConfigError where broker or scheduler stand on a machine on which nothing would start them."""
    head = plan.train[0].node
    region = node_classes(problem)[head].region
    beside = [name for name, host in host_classes(problem).items() if host.region == region]
    if plan.broker is not None and plan.broker.count > 1 and plan.broker.node == head:
        raise ConfigError(
            f"broker.count: {plan.broker.count}; the head has one, which the run starts; set it to 1, or broker.node "
            "to a machine without GPUs"
        )
    for service, machine in plan.center.items():
        if machine not in (head, *beside):
            field = "broker.node" if service == "broker" else service
            raise ConfigError(
                f"{field}: {machine}; the {service} stands on the head or on a machine without GPUs of {region}: name "
                f"{' or '.join((head, *beside[:8]))}, or add one to `hosts` of the problem"
            )


def check_engine(plan: PlanDocument, run: Document) -> None:
    """Raise ConfigError for generators that the run's engine cannot be."""
    name = run.get("generator", {}).get("engine", DEFAULT_ENGINE.engine)
    for index, each in enumerate(plan.gen):
        if each.pp > 1 and name in ENGINES and not ENGINES[name].has_pipeline_stages:
            raise ConfigError(
                f"gen.{index}.pp: {each.pp} stages, and the engine {name} has none; set generator.engine to vllm, or "
                "constraints.gen_pp to 1 and plan again"
            )


def placed(run: Document, layout: Layout) -> Document:
    """The run with paths that mean the same on every machine. Raises ConfigError."""
    sections = ("model", "data", "algorithm", "reward")
    found = {section: deepcopy(run[section]) for section in sections if isinstance(run.get(section), dict)}
    stated_at = (("model.path", "model", "path"), ("algorithm.reference_path", "algorithm", "reference_path"))
    places = [(setting, found[at], key) for setting, at, key in stated_at if found.get(at, {}).get(key) is not None]
    for setting, holder, key in (*places, *data_files(found.get("data", {})), *canary_files(found)):
        stated = holder[key]
        if looks_like_address(stated):
            continue
        path = PurePath(str(stated))
        if layout.is_container:
            path = DATA / path
            if not path.is_relative_to(DATA) or ".." in path.parts:
                raise ConfigError(
                    f"{setting}: {stated} is outside {DATA}, the folder that containers see; name it below that"
                )
        elif not path.is_absolute():
            raise ConfigError(f"{setting}: {stated} is relative; name its path on every machine, from / on")
        holder[key] = str(path)
    return {**run, **found}


def run_config(
    model: CostModel, plan: PlanDocument, run: Document, *, is_emulated: bool, moves_trainer: bool
) -> Document:
    """The run's configuration with the settings that the plan was computed for."""
    problem = model.problem
    workload = problem.workload
    endpoints = {key: value for key, value in run.get("endpoints", {}).items() if key != "generators"}
    config: Document = {
        **run,
        "run": {"id": re.sub(r"[^A-Za-z0-9._-]", "-", problem.id), **run.get("run", {})},
        "algorithm": {
            **({"name": "ppo"} if _trains_a_critic(problem) else {}),
            **run.get("algorithm", {}),
            "group_size": workload.group_size,
            "prompts_per_step": workload.prompts_per_step,
            "max_staleness": workload.staleness,
        },
        "sampling": {**run.get("sampling", {}), "max_new_tokens": math.ceil(workload.output_len.longest)},
        "endpoints": endpoints,
    }
    if plan.broker is not None and plan.broker.count > 1:
        config["policy"] = {"token_shards": plan.broker.token_shards, **run.get("policy", {})}
    if plan.score:
        config["algorithm"] = {"reference": "service", **config["algorithm"]}
        config["scorers"] = 0
    if plan.critic is not None:
        config["algorithm"] = {"critic": "service", **config["algorithm"]}
    if plan.reward_gpus or (plan.reward and plan.train[0].node not in plan.reward):
        config["rewards"] = 0
    if moves_trainer:
        config["trainer"] = moving_section(model, run.get("trainer", {}))
    if is_emulated:
        emulated = emulation(problem, run["generator"].get("emulated", {}))
        config["generator"] = {**run["generator"], "emulated": emulated}
        if run.get("trainer", {}).get("device") != "cpu":
            # The trainer is real, on this machine's hardware: it keeps the run's settings.
            return config
        # Processes on CPUs stand for the plan's GPUs.
    return config if moves_trainer else {**config, "trainer": trainer_section(model, plan, run.get("trainer", {}))}


def _trains_a_critic(problem: Problem) -> bool:
    """Whether more than the policy is trained."""
    return sum(task.kind == "train" for task in problem.workload.train_tasks) > 1


def trainer_roots(config: Document) -> list[str]:
    """The paths that the run's trainer reads and writes, as the run names them."""
    paths = (config["run"].get("dir", "runs"), *run_sources(config))
    return [str(path) for path in paths if not looks_like_address(path)]


def run_sources(config: Document) -> list[Any]:
    """Paths and addresses of the run's model, data and checkpoints."""
    files = [holder[key] for _, holder, key in data_files(config.get("data", {}))]
    found = (config["model"]["path"], *files, config["run"].get("checkpoint_storage"))
    return [source for source in found if source is not None]


def scheduler_config(config: Document, runs: str, *, listen: str) -> Document:
    """What the run states of its scheduler, in that service's own fields; `runs` is its folder of runs."""
    stated = config.get("scheduler", {})
    same = {key: stated[key] for key in ("heartbeat_interval_s", "cost_model") if key in stated}
    fields = {"model_path": "length_model", "pairs_file": "length_pairs"}
    lengths = {own: stated[key] for own, key in fields.items() if stated.get(key) is not None}
    if lengths:
        same["lengths"] = {**lengths, "state_dir": f"{runs}/{config['run']['id']}/lengths"}
    return {"listen": listen, **same}
