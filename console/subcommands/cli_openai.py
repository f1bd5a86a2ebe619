"""Defines the command `penstock openai`: names, options and help. Imports nothing but typer until it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from console.subcommands.cli_common import command

app = typer.Typer(name="openai", help="Make keys for agents that use the OpenAI API.", no_args_is_help=True)
# Otherwise typer takes the only command for the whole group.
app.callback()(lambda: None)


@command(app)
def key(
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="Run id.")],
    session: Annotated[
        str,
        typer.Option("--session", metavar="NAME", help="The session that it opens; a final * matches any ending."),
    ],
    group: Annotated[str, typer.Option("--group", metavar="TASK", help="The task that the sessions belong to.")] = "",
    valid: Annotated[str, typer.Option("--valid", metavar="TIME", help="Validity in s, m, h or d, up to 30d.")] = "1h",
    reward: Annotated[bool, typer.Option("--reward", help="Allow it to reward its sessions as well.")] = False,
) -> int:
    """Print an API key that opens an agent's own sessions and nothing else. Contacts no service.

    Signs with the generators' secret, from PENSTOCK_OPENAI_SECRET or the file that PENSTOCK_OPENAI_SECRET_FILE names.

    Examples:
      penstock openai key --run math-7b --session task7-0 --group task7 --valid 30m
      penstock openai key --run math-7b --session 'task7-*' --group task7
    """
    from console.certs.openai_keys import key_command

    return key_command(run, session=session, group=group, valid=valid, may_reward=reward)
