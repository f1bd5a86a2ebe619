"""Defines the command of a machine that follows a plan. Imports nothing but typer until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import command

app = typer.Typer()


@command(app)
def node(
    config: Annotated[Path, typer.Argument(metavar="NODE.yaml", help="The machine; `plan --deploy` writes it.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY.SUBKEY=VALUE]...", help="Settings.")] = None,
) -> int:
    """Offer this machine to a run: start and stop the generators that its plan assigns to it, until SIGTERM or Ctrl-C.

    Exit status 1 if a generator could not be kept running; the machine is then removed from the plan. Exit status 2
    if the configuration is wrong, or the scheduler refuses the token.

    Examples:
      penstock node out/r0/node-h20-0.yaml
      penstock node out/r0/node-h20-0.yaml node_id=h20-new
    """
    from console.node.node import node_command

    return node_command(config, overrides or [])
