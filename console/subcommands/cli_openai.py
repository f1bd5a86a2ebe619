"""The command `penstock openai`: names, options and help. Imports nothing but typer until it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from console.subcommands.cli_common import command

app = typer.Typer(name="openai", help="Make keys for agents that speak OpenAI.", no_args_is_help=True)
# Else typer takes the only command for the whole group.
app.callback()(lambda: None)


@command(app)
def key(
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="Run id.")],
    session: Annotated[
        str,
        typer.Option("--session", metavar="NAME", help="The session it opens; with * at the end all that begin so."),
    ],
    group: Annotated[str, typer.Option("--group", metavar="TASK", help="The task that they belong to.")] = "",
    valid: Annotated[str, typer.Option("--valid", metavar="TIME", help="In s, m, h or d; at most 30d.")] = "1h",
    reward: Annotated[bool, typer.Option("--reward", help="May also reward its sessions.")] = False,
) -> int:
    """Print an API key that opens an agent's own sessions, and nothing else. Asks no service.

    Signs with PENSTOCK_OPENAI_SECRET, or with the file that PENSTOCK_OPENAI_SECRET_FILE names: the generators' own.

    Examples:
      penstock openai key --run math-7b --session task7-0 --group task7 --valid 30m
      penstock openai key --run math-7b --session 'task7-*' --group task7
    """
    from console.certs.openai_keys import key_command

    return key_command(run, session=session, group=group, valid=valid, may_reward=reward)
