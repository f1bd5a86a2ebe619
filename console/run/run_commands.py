"""Implements the commands `penstock run`, `quickstart` and `report`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from console.config.config import RunConfig, load_run_config, resolve, to_yaml
from console.config.derive import training_config
from console.config.run_folder import RunFolder, open_folder
from console.devices.device_table import run_table
from console.page.report import write_report
from console.run.as_planned import as_planned
from console.run.local_run import execute_run
from console.run.preflight import check_run
from console.run.quick import prepare_task, quickstart_config
from console.view.outcome import read_summary, summary_lines
from penstock.config import ConfigError
from penstock.process.log_setup import configure_logging
from penstock.security import Security

_COMPLETED = (
    "run {run_id} completed before; it stays as it is: {folder}\n"
    "start another with its own run.id, or give this one more steps: "
    "penstock run --resume {folder} run.num_steps=N"
)


def run_command(arguments: list[str], *, dry_run: bool, resume: Path | None, resume_or_start: bool = False) -> int:
    """Run `penstock run`; returns the exit status. Raises ConfigError."""
    _quiet_logging()
    if resume_or_start:
        folder = _folder_to_resume(arguments, resume=resume)
        if folder is not None and _is_completed(folder):
            print(_COMPLETED.format(run_id=folder.path.name, folder=folder.path))
            return 0
        if folder is not None:
            print(f"resumes {folder.path}; its config.yaml counts, not {arguments[0]}", flush=True)
            resume, arguments = folder.path, arguments[1:]
    if resume is not None:
        config, source = load_run_config(open_folder(resume).config, arguments), str(resume / "config.yaml")
    elif not arguments:
        raise ConfigError("run: name a configuration file, or a run folder with --resume")
    else:
        config, source = load_run_config(Path(arguments[0]), arguments[1:]), arguments[0]
    config = resolve(config, now_s=time.time())
    if resume is None:
        # What is resumed may have moved since.
        config = as_planned(config)
    home = config.run.dir / config.run.id
    if resume is not None and not home.is_dir():
        # Otherwise the services would begin another run there, without its checkpoints.
        raise ConfigError(
            f"{source}: run.dir: {home.absolute()} does not exist; a run is resumed where it was begun: move its "
            "folder back there, or change to the folder that it was started from"
        )
    # Refuse here what the trainer would refuse, before anything starts; addresses do not matter for that.
    training_config(config, broker="127.0.0.1:1", source=source)
    if dry_run:
        return _dry_run(config, is_resume=resume is not None, source=source)
    is_resume = resume is not None
    may_be_begun = resume_or_start and config.run.checkpoint_storage is not None
    return asyncio.run(execute_run(config, is_resume=is_resume, source=source, may_be_begun=may_be_begun))


def quickstart_command(overrides: list[str], *, seed: int, directory: Path, prepare_only: bool) -> int:
    """Run `penstock quickstart`; returns the exit status. Raises ConfigError."""
    _quiet_logging()
    base = directory.expanduser().absolute()
    # Read before the task is made, so that a mistyped setting is reported at once.
    quickstart_config(overrides, seed=seed, directory=base, task=None)
    task = prepare_task(base / "quickstart", seed=seed)
    if prepare_only:
        print(f"prepared: {task.model_dir.parent}")
        return 0
    config = resolve(quickstart_config(overrides, seed=seed, directory=base, task=task), now_s=time.time())
    return asyncio.run(execute_run(config, is_resume=False, source="quickstart"))


def report_command(run_dir: Path) -> int:
    """Run `penstock report`; returns the exit status. Raises ConfigError."""
    folder = open_folder(run_dir)
    try:
        has_report = write_report(folder)
    except OSError as error:
        raise ConfigError(f"{run_dir}: {error}") from error
    if not has_report:
        raise ConfigError(f"{run_dir}: nothing to report yet; the first step is not done")
    summary = read_summary(folder.summary)
    for line in summary_lines(summary) if summary is not None else ():
        print(line)
    print(f"report: {folder.report}")
    return 0


def _folder_to_resume(arguments: list[str], *, resume: Path | None) -> RunFolder | None:
    """The folder of the requested run, if it was started before. Raises ConfigError."""
    if resume is not None or not arguments:
        raise ConfigError("--resume-or-start: name a configuration file with it, and no --resume")
    config = load_run_config(Path(arguments[0]), arguments[1:])
    if not config.run.id:
        raise ConfigError("run.id: required with --resume-or-start, which finds the run by its id")
    folder = RunFolder(config.run.dir.expanduser().absolute() / config.run.id)
    return folder if folder.config.is_file() else None


def _is_completed(folder: RunFolder) -> bool:
    summary = read_summary(folder.summary)
    return summary is not None and summary.get("outcome") == "completed"


def _quiet_logging() -> None:
    # The display shows what the user needs to know; the services' own logs are in the run folder.
    configure_logging("console", level="error")


def _dry_run(config: RunConfig, *, is_resume: bool, source: str) -> int:
    folder = RunFolder(config.run.dir / config.run.id)
    security = Security.from_environment(insecure=config.insecure)
    checked = asyncio.run(check_run(config, folder, is_resume=is_resume, security=security, source=source))
    for note in checked.notes:
        print(f"# note: {note}")
    for line in run_table(checked.devices) if checked.devices is not None else ():
        print(f"# {line}")
    print(to_yaml(config), end="")
    return 0
