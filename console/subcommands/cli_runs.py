"""The command `penstock runs`: names, options and help. Imports nothing but typer until one runs."""

# ruff: noqa: D301 - a backspace is click's mark for a paragraph that is not wrapped anew, so no docstring here is raw.

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import Broker, RunsDir, exit_with

_Run = Annotated[str, typer.Argument(metavar="RUN", help="Run id, or run folder.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    runs = typer.Typer(help="The runs a broker's store holds: list, show, delete.", no_args_is_help=True)
    runs.command("list")(list_runs)
    runs.command("show")(show)
    runs.command("delete")(delete)
    app.add_typer(runs, name="runs")


def list_runs(broker: Broker = None, directory: RunsDir = Path("runs"), as_json: _Json = False) -> None:
    """List the runs, oldest first; of more than 1,000 the newest.

    \b
    Example:
      penstock runs list --broker broker:7301
    """

    def work() -> int:
        from console.inspect.stored_runs import list_command

        return list_command(broker=broker, runs_dir=directory, as_json=as_json)

    exit_with(work)


def show(run: _Run, broker: Broker = None, directory: RunsDir = Path("runs"), as_json: _Json = False) -> None:
    """Show a run: instance, trainer, limits, policy, audit.

    \b
    Example:
      penstock runs show math-7b --broker broker:7301
    """

    def work() -> int:
        from console.inspect.stored_runs import show_command

        return show_command(run, broker=broker, runs_dir=directory, as_json=as_json)

    exit_with(work)


def delete(
    run: _Run,
    broker: Broker = None,
    directory: RunsDir = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Even though it is open and being worked on.")] = False,
) -> None:
    """Delete a run from the broker's store, for good; run folders stay. May be repeated.

    \b
    Example:
      penstock runs delete math-7b --broker broker:7301
    """

    def work() -> int:
        from console.inspect.stored_runs import delete_command

        return delete_command(run, broker=broker, runs_dir=directory, is_forced=force)

    exit_with(work)
