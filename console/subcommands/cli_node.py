"""The command of a machine that follows a plan: name, options and help. Imports nothing but typer until it runs."""

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
    """Offer this machine to a run: start and stop the generators that its plan gives it, until SIGTERM or Ctrl-C.

    Exit status 1 when a generator could not be kept running; the machine is then taken out of the plan. Exit status 2
    when the configuration is wrong, or the scheduler refuses the token.

    Examples:
      penstock node out/r0/node-h20-0.yaml
      penstock node out/r0/node-h20-0.yaml node_id=h20-new
    """
    from console.node.node import node_command

    return node_command(config, overrides or [])
