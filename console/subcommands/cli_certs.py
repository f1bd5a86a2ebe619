"""Defines `penstock certs` and `openai`: names, options and help. Imports nothing but typer until one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import Json, command

_DEFAULT = Path("authority")
_Authority = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The authority's folder.")]

app = typer.Typer(
    name="certs",
    help="Make an authority and short-lived certificates that name their holders' roles.",
    no_args_is_help=True,
)
openai_app = typer.Typer(name="openai", help="Make keys for agents that use the OpenAI API.", no_args_is_help=True)
# Otherwise typer takes the only command for the whole group.
openai_app.callback()(lambda: None)


@command(app)
def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to make it in.")] = _DEFAULT,
    name: Annotated[str, typer.Option("--name", help="Its name in certificates.")] = "Penstock",
    days: Annotated[int, typer.Option("--days", help="Its validity in days.")] = 3650,
) -> int:
    """Make an authority: ca.pem, which every process trusts, and ca-key.pem, which never leaves this folder.

    Examples:
      penstock certs init
      penstock certs init ~/authority --name "Penstock of team A" --days 730
    """
    from console.certs.commands import init_command

    return init_command(folder, name=name, days=days)


@command(app)
def issue(  # noqa: PLR0913, PLR0917 - one argument for each option
    roles: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE...", help="operator, trainer, generator, reward, environment, observer or broker."
        ),
    ],
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="Run id that it is for; '*' for any.")],
    site: Annotated[str, typer.Option("--site", metavar="SITE", help="Site that it is for; '*' for any.")],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Its holder may use the ids NAME and NAME-anything.")
    ],
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="HOST",
            help="DNS name or IP address at which others reach its holder; may be repeated. localhost, 127.0.0.1 and "
            "::1 are always among them.",
        ),
    ] = None,
    days: Annotated[int | None, typer.Option("--days", help="Validity in days; default 30.")] = None,
    valid: Annotated[
        str | None, typer.Option("--valid", metavar="TIME", help="Validity in s, m, h or d: 1m, 12h, 7d.")
    ] = None,
    directory: _Authority = _DEFAULT,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Folder to write to; default DIR/issued/NAME.")
    ] = None,
    at: Annotated[
        Path | None,
        typer.Option("--at", metavar="FOLDER", help="Path of that folder on its holder's machine, for `env`."),
    ] = None,
) -> int:
    """Issue a certificate with a new key: ca.pem, cert.pem, key.pem and env, in one folder for one holder.

    Issuing to the same folder again renews it: with a new key, each file replaced atomically, the certificate last.
    Certificates are valid from five minutes earlier, for machines whose clocks are slightly behind.

    Examples:
      penstock certs issue trainer --run math-7b --site fra --name trainer --host trainer.example.org
      penstock certs issue generator environment --run math-7b --site waw --name waw-0 --host 10.0.0.7 --valid 12h
      penstock certs issue operator --run '*' --site '*' --name anna --out ~/.penstock/tls
      penstock certs issue generator --run math-7b --site waw --name waw-1 --out waw-1 --at /etc/penstock
    """
    from console.certs.commands import issue_command
    from console.certs.request import checked_request, read_validity

    request = checked_request(roles, run=run, site=site, name=name, hosts=hosts or ())
    validity = read_validity(days=days, valid=valid)
    return issue_command(request, validity=validity, directory=directory, out=out, at=at)


@command(app)
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The holder, as --name said when it was issued.")],
    directory: _Authority = _DEFAULT,
) -> int:
    """Revoke all valid certificates of a holder: services refuse them once they have the list, DIR/revoked.

    Copy that file beside the ca.pem of every machine. No restart is needed.

    Examples:
      penstock certs revoke waw-0
    """
    from console.certs.commands import revoke_command

    return revoke_command(name, directory=directory)


@command(app, "list")
def list_certificates(
    directory: _Authority = _DEFAULT,
    is_all: Annotated[bool, typer.Option("--all", help="Include expired and replaced ones.")] = False,
    as_json: Json = False,
) -> int:
    """List what an authority has issued, oldest first, and when each expires.

    Examples:
      penstock certs list
      penstock certs list --dir ~/authority --all --json
    """
    from console.certs.commands import list_command

    return list_command(directory, is_all=is_all, as_json=as_json)


@command(openai_app)
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
