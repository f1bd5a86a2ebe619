"""Writes a deployment: what an engine starts at each site, and the configurations of everything that is started.

The plan is described once (`description`, `services`, `configurations`); a module for each engine writes that
description in the engine's own words. Secrets are no part of it: files name the folders and files that hold them, and
README.md says how to make those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from console.config.run_folder import is_there
from console.deploy.configurations import PLAIN_RUN, Configurations
from console.deploy.description import IN_CONTAINERS, IN_FOLDERS, IN_PODS, Deployment, Files, Layout
from console.deploy.engines.compose import compose_files
from console.deploy.engines.kubernetes import kubernetes_files
from console.deploy.engines.skypilot import skypilot_files
from console.deploy.engines.slurm import slurm_files
from console.deploy.readme import readme
from console.deploy.services import describe
from penstock.config import ConfigError, Document
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument

COMPOSE = "compose"


@dataclass(frozen=True, slots=True)
class Engine:
    """What starts containers or processes on machines."""

    write: Callable[[Deployment], Files]
    """Its files, with a text README of the steps under the name `STEPS`; raises ConfigError for what it cannot run."""
    layout: Layout


ENGINES: Mapping[str, Engine] = {
    COMPOSE: Engine(compose_files, IN_CONTAINERS),
    "kubernetes": Engine(kubernetes_files, IN_PODS),
    "skypilot": Engine(skypilot_files, IN_FOLDERS),
    "slurm": Engine(slurm_files, IN_FOLDERS),
}


def write_deployment(
    folder: Path,
    model: CostModel,
    plan: PlanDocument,
    *,
    engine: str = COMPOSE,
    run: Document = PLAIN_RUN,
    address: str | None = None,
    head_address: str | None = None,
    moves_trainer: bool = False,
) -> list[Path]:
    """Write all files into a folder that is new or empty; returns their paths. Raises ConfigError.

    Args:
        folder: Where to write.
        model: The problem and its cost model.
        plan: Who trains and who generates.
        engine: One of `ENGINES`.
        run: The run's own configuration.
        address: Reaches every machine, to try the plan on one; None: each is reached under its own name.
        head_address: Where other sites reach the head, for engines that do not know it by its name; with a comma
            behind it where they reach each machine without GPUs that the plan uses.
        moves_trainer: Whether revisions may move the trainer, through `run.checkpoint_storage`.
    """
    if is_there(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--deploy: {folder} is not an empty folder; name a new one")
    files = deployment(
        model,
        plan,
        engine=engine,
        run=run,
        address=address,
        head_address=head_address,
        moves_trainer=moves_trainer,
        folder=folder.expanduser().absolute(),
    )
    try:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_text(content), encoding="utf-8")
            if name.endswith(".sh"):
                path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"--deploy: {folder}: {error.strerror}; name a folder that can be made") from error
    return [folder / name for name in files]


def deployment(
    model: CostModel,
    plan: PlanDocument,
    *,
    engine: str = COMPOSE,
    run: Document = PLAIN_RUN,
    address: str | None = None,
    head_address: str | None = None,
    moves_trainer: bool = False,
    folder: Path,
) -> Files:
    """Every file's content by its path in `folder`; all are validated. Raises ConfigError."""
    if engine not in ENGINES:
        raise ConfigError(f"--for: {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    if address is not None and engine != COMPOSE:
        raise ConfigError(f"--address: tries a plan on this machine, without {engine}; leave one of them out")
    writer = ENGINES[engine]
    made = Configurations(
        model, plan, run=run, layout=writer.layout, address=address, folder=folder, moves_trainer=moves_trainer
    )
    described = describe(made, head_address=head_address)
    files = {**described.configurations, **writer.write(described)}
    return {**files, "README.md": readme(described, str(files.pop("README.md")))}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, without quotes and escapes."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _text(content: Document | list[Document] | str) -> str:
    if isinstance(content, str):
        return content
    documents = content if isinstance(content, list) else [content]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False)
