"""Checks everything that can be checked before anything is started: one line per problem, without side effects."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from console.config.config import RunConfig
from console.config.folder_lock import LOCK_NAME
from console.config.listeners import listener_problems, listener_warnings, local_listeners
from console.config.run_folder import CONSOLE_NAME, RunFolder
from console.config.sections import SchedulerSection
from console.devices.device_table import run_table
from console.devices.nvidia_smi import NvidiaSmiError
from console.devices.run_devices import RunDevices, survey
from console.inspect.certificates import certificate_findings
from console.launch.disk_watch import MIN_FREE_BYTES
from console.launch.embedded_redis import redis_executable
from console.launch.ports import listen_problem
from console.launch.probes import redis_problem, service_problem
from console.launch.supervisor import console_argv, service_environment
from console.node.config import device_differences, read_machine, read_nodes
from console.run.as_planned import elsewhere
from console.run.grader_check import grader_problems
from console.run.model_check import (
    context_problem,
    data_problems,
    model_problems,
    reference_problems,
    routing_problem,
    text_problem,
)
from penstock.config import ConfigError
from penstock.process.disk import free_bytes, full_message
from penstock.rewards.score_messages import THIRD_PARTY
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.storage.fetched import beside_loop
from services.broker.storage.redis.authentication import RedisCredentials, protected_url
from services.reward.config import RewardModelConfig
from services.scheduler.problem.plan_document import node_classes, read_plan
from services.scheduler.problem.problem import read_problem
from services.trainer.checkpoints.checkpoint import CheckpointFormatError, newest_state
from services.trainer.data.row_digests import ORDER_KEY, check_rows
from services.trainer.run_sections import TRACKER_PACKAGES

_REWARD_IMPORT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the checks of a run found."""

    notes: list[str]
    """For the user, one line each."""
    devices: RunDevices | None
    """The GPUs that its processes get, not yet claimed; None if nothing is assigned."""


async def check_run(
    config: RunConfig, folder: RunFolder, *, is_resume: bool, security: Security, source: str
) -> Checked:
    """Check the model, the data, the reward, ports, GPUs and all services that must already answer.

    Raises ConfigError with one line per reason not to start; GPUs that do not fit add the table of who has what.
    """
    problems = _folder_problems(folder, is_resume=is_resume) + _recording_problems(config, is_resume=is_resume)
    warnings: list[str] = []
    if config.endpoints.trainer is None:
        found = await beside_loop(model_problems, config.model.path)
        if not found:
            checks = (context_problem(config), text_problem(config), routing_problem(config))
            found = [problem for problem in checks if problem]
        problems += found
        # The tokenizer counts the tokens of rows.
        if not found or isinstance(config.model.path, Path):
            data, warnings = await beside_loop(data_problems, config)
            problems += data
    elif (problem := await beside_loop(text_problem, config)) is not None:
        problems.append(problem)
    if is_resume:
        problems += await beside_loop(_changed_rows, config, folder)
    problems += _lengths_problems(config) + _plan_problems(config) + reference_problems(config)
    problems += _package_problems(config)
    problems += _port_problems(config) + listener_problems(config, security)
    warnings += listener_warnings(config, security)
    for finding in certificate_findings(config, security):
        (problems if finding.is_error else warnings).append(finding.text)
    problems += await _network_problems(config, security)
    if config.starts_reward:
        problems += await _all_reward_problems(config)
    problems += await environment_problems(config)
    devices, misfits, notes = await asyncio.to_thread(_devices, config)
    problems += misfits
    if problems:
        table = run_table(devices) if devices is not None and misfits else []
        raise ConfigError("\n".join([*(f"{source}: {problem}" for problem in problems), *table]))
    return Checked(notes=warnings + notes, devices=devices)


def _devices(config: RunConfig) -> tuple[RunDevices | None, list[str], list[str]]:
    """The GPUs of the run, why they do not do, and what else is to be said of them."""
    try:
        devices = survey(config)
    except ConfigError as error:
        return None, str(error).splitlines(), []
    except NvidiaSmiError as error:
        return None, [], [f"GPUs are not assigned to processes: {error}"]
    if devices is None:
        return None, [], []
    return devices, devices.allocation.problems, devices.notes


def _changed_rows(config: RunConfig, folder: RunFolder) -> list[str]:
    """Files of rows that are not those with which the run began, as far as both and a checkpoint are here."""
    try:
        state = newest_state(folder.checkpoints)
    except CheckpointFormatError:
        # The trainer says what is wrong with it.
        return []
    if state is None:
        return []
    problems = []
    for source in config.data.train_sources:
        if isinstance(source.path, Path) and source.path.is_file():
            try:
                check_rows(state.extra.get(ORDER_KEY, ""), source.name, source.path)
            except (ConfigError, OSError) as error:
                problems.append(f"data.train: {error}")
    return problems


def _lengths_problems(config: RunConfig) -> list[str]:
    if config.endpoints.scheduler is not None:
        return []
    pairs, model = config.scheduler.length_pairs, config.scheduler.length_model
    problems = []
    if pairs is not None and not pairs.is_file():
        problems.append(f"scheduler.length_pairs: {pairs}: no such file")
    if model is not None and not (model / "config.json").is_file():
        problems.append(f"scheduler.length_model: {model}: holds no config.json of a model")
    if model is not None and not _is_installed("transformers"):
        problems.append("scheduler.length_model: needs torch and transformers, which are not installed")
    return problems


def _plan_problems(config: RunConfig) -> list[str]:
    section = config.scheduler
    checks: list[tuple[str, Path | None, Callable[[Path], object]]] = [
        ("problem", section.problem, read_problem),
        ("plan", section.plan, read_plan),
        *(("nodes", path, read_machine) for path in section.nodes),
    ]
    problems = []
    for key, path, read in checks:
        try:
            if path is not None:
                read(path)
        except ConfigError as error:
            problems += [f"scheduler.{key}: {line}" for line in str(error).splitlines()]
    return problems or _other_machines(section)


def _other_machines(section: SchedulerSection) -> list[str]:
    """Where machines that are started here are not those of the problem, whose files can be read."""
    if section.problem is None:
        return []
    planned = node_classes(read_problem(section.problem))
    stated = read_nodes(section.nodes)
    return [
        f"scheduler.nodes: {line}"
        for path, node in stated.items()
        if (entry := planned.get(node.node_id)) is not None
        for line in device_differences(path, node, gpu=entry.gpu, gpus=entry.gpus, source=str(section.problem))
    ]


def _recording_problems(config: RunConfig, *, is_resume: bool) -> list[str]:
    if is_resume or not isinstance(config.record, Path) or not config.record.exists():
        return []
    return [f"record: {config.record} exists already; remove it, or name another file"]


async def environment_problems(config: RunConfig) -> list[str]:
    """Check that the environment can be used. Raises ConfigError."""
    section = config.environment
    if section is None:
        return []
    judges = Security.from_environment(JUDGES, insecure=config.insecure)
    if not section.is_local:
        target = section.target.removeprefix(THIRD_PARTY)
        problem = await service_problem(target, "environment", security=judges)
        return [f"environment.target: environment server: {problem}; start it first"] if problem else []
    listen = config.listen.environment
    exposed = None if listen is None else judges.listener_problem(listen, setting="listen.environment")
    found = await asyncio.to_thread(_import_problems, "env", (section.target,), setting="environment.target")
    return [*([exposed] if exposed else []), *found]


async def _all_reward_problems(config: RunConfig) -> list[str]:
    """Of the run's reward, and of those that sources have of their own."""
    problems = await _problems_of_reward(config.reward, is_insecure=config.insecure)
    for name, reward in config.source_rewards.items():
        found = await _problems_of_reward(reward, is_insecure=config.insecure)
        problems += [f"data: source {name!r}: {problem}" for problem in found]
    return problems


async def _problems_of_reward(reward: RewardModelConfig, *, is_insecure: bool) -> list[str]:
    names = list(dict.fromkeys(each.model for each in reward.models))
    problems = await reward_problems(names, is_insecure=is_insecure)
    return problems or await grader_problems(reward, is_insecure=is_insecure)


async def reward_problems(models: Sequence[str], *, is_insecure: bool) -> list[str]:
    """Check that the reward models of these names can be used. Raises ConfigError."""
    remote = [model for model in models if model.startswith(THIRD_PARTY)]
    judges = Security.from_environment(JUDGES, insecure=is_insecure)
    found = [await service_problem(each.removeprefix(THIRD_PARTY), "reward", security=judges) for each in remote]
    problems = [f"reward.model: reward server: {problem}; start it first" for problem in found if problem]
    local = tuple(model for model in models if model not in remote)
    return problems + (
        await asyncio.to_thread(_import_problems, "reward", local, setting="reward.model") if local else []
    )


def _import_problems(command: str, names: Sequence[str], *, setting: str) -> list[str]:
    """Why what users' modules hold, by these names, cannot be loaded."""
    # In a separate process: importing runs the user's code, which may import anything.
    shown = ", ".join(names)
    try:
        result = subprocess.run(
            console_argv(command, "resolve", *names),
            env=service_environment(os.environ, num_threads=1),
            capture_output=True,
            text=True,
            timeout=_REWARD_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"{setting}: importing {shown} took longer than {_REWARD_IMPORT_TIMEOUT_S:g} s"]
    if result.returncode == 0:
        return []
    said = [line for line in result.stderr.strip().splitlines() if line.strip()]
    return [f"{setting}: {said[-1].removeprefix('penstock: ') if said else f'{shown} cannot be loaded'}"]


def _folder_problems(folder: RunFolder, *, is_resume: bool) -> list[str]:
    if free_bytes(folder.path) < MIN_FREE_BYTES:
        return [f"run.dir: {full_message(folder.path)}" if is_resume else f"run.dir: {folder.path}: the disk is full"]
    if is_resume:
        mine = [record for record in folder.records() if record.is_alive]
        running = [record for record in mine if record.name == CONSOLE_NAME]
        if running:
            return [f"{folder.path}: this run is under way (process {running[0].pid}); stop it first: penstock stop"]
        return [f"{folder.path}: {record.name} of this run still runs (process {record.pid})" for record in mine]
    if folder.path.exists() and (not folder.path.is_dir() or _holds_a_run(folder.path)):
        return [
            f"run.id: {folder.path} exists already; choose another run.id, or continue it with --resume {folder.path}"
        ]
    parent = next(path for path in folder.path.parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        return [f"run.dir: {parent} cannot be written to"]
    return []


def _holds_a_run(path: Path) -> bool:
    """Whether the folder has more in it than a console leaves that ended before it wrote its configuration."""
    return any(found.name != LOCK_NAME for found in path.iterdir())


def _package_problems(config: RunConfig) -> list[str]:
    problems = [
        f"generator.engine: {config.generator.engine} needs the package {package}, which is not installed; "
        "install it, or choose another engine"
        for package in config.generator.packages[:1]
        if config.starts_generators and not _is_installed(package)
    ]
    if config.endpoints.trainer is None and not _is_installed("torch"):
        problems.append(
            "the trainer needs the package torch, which is not installed; install it, or name endpoints.trainer"
        )
    if config.endpoints.trainer is None:
        problems += [
            f"run.trackers: {name} needs the package {TRACKER_PACKAGES[name]}, which is not installed; install it, or "
            "leave it out"
            for name in config.run.trackers
            if not _is_installed(TRACKER_PACKAGES[name])
        ]
    if config.endpoints.broker is None and config.broker.redis_url is None:
        try:
            redis_executable()
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _port_problems(config: RunConfig) -> list[str]:
    listeners = dict(local_listeners(config))
    if config.environment is not None and config.environment.is_local:
        listeners["listen.environment"] = config.listen.environment
    local = [(name, address) for name, address in listeners.items() if address is not None]
    problems = [f"{name}: {problem}" for name, address in local if (problem := listen_problem(address))]
    seen: dict[str, str] = {}
    for name, address in local:
        if address in seen:
            problems.append(f"{name}: {address} is also {seen[address]}; give each service its own")
        seen[address] = name
    return problems


async def _network_problems(config: RunConfig, security: Security) -> list[str]:
    endpoints = config.endpoints
    single = ((name, getattr(endpoints, name)) for name in ("broker", "scheduler", "reward", "trainer", "critic"))
    # One that moves is started by its machine once there is a plan, and machines of a plan start when the run does.
    later = {*elsewhere(config), *(["trainer"] if config.moves_trainer else [])}
    if config.scheduler.plan is not None and config.endpoints.critic is not None:
        later |= {"critic"} if read_plan(config.scheduler.plan).critic is not None else set()
    wanted = [(name, target) for name, target in single if target is not None and name not in later]
    wanted += [("generators", target) for target in endpoints.generators or ()]
    checks = (
        # The others serve only once the run exists.
        service_problem(target, key.removesuffix("s"), security=security, must_serve=key in ("broker", "scheduler"))
        for key, target in wanted
    )
    answers = await asyncio.gather(*checks)
    problems = [f"endpoints.{key}: {problem}" for (key, _), problem in zip(wanted, answers, strict=True) if problem]
    if endpoints.broker is None and config.broker.redis_url is not None:
        problems += await asyncio.to_thread(_redis_problems, config.broker.redis_url, security)
    return problems


def _redis_problems(stated: str, security: Security) -> list[str]:
    try:
        credentials = RedisCredentials.from_environment(security)
        url = protected_url(stated, credentials, setting="broker.redis_url", security=security)
    except ConfigError as error:
        return [str(error)]
    problem = redis_problem(url, credentials=credentials)
    return [f"broker.redis_url: {problem}"] if problem else []


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
