"""Defines the command `penstock runs`: names, options and help. Imports nothing but typer until one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import Broker, Json, RunsDir, command

_Run = Annotated[str, typer.Argument(metavar="RUN", help="Run id, or run folder.")]

app = typer.Typer(name="runs", help="List, show and delete the runs in a broker's store.", no_args_is_help=True)


@command(app, "list")
def list_runs(broker: Broker = None, directory: RunsDir = Path("runs"), as_json: Json = False) -> int:
    """List the runs, oldest first; at most the newest 1,000.

    Example:
      penstock runs list --broker broker:7301
    """
    from console.inspect.stored_runs import list_command

    return list_command(broker=broker, runs_dir=directory, as_json=as_json)


@command(app)
def show(run: _Run, broker: Broker = None, directory: RunsDir = Path("runs"), as_json: Json = False) -> int:
    """Show a run: instance, trainer, limits, policy, audit.

    Example:
      penstock runs show math-7b --broker broker:7301
    """
    from console.inspect.stored_runs import show_command

    return show_command(run, broker=broker, runs_dir=directory, as_json=as_json)


@command(app)
def delete(
    run: _Run,
    broker: Broker = None,
    directory: RunsDir = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Delete it even if it is open and in use.")] = False,
) -> int:
    """Delete a run from the broker's store, for good; run folders stay. May be repeated.

    Example:
      penstock runs delete math-7b --broker broker:7301
    """
    from console.inspect.stored_runs import delete_command

    return delete_command(run, broker=broker, runs_dir=directory, is_forced=force)
