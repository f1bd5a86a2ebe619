"""The command `penstock certs`: names, options and help. Imports nothing but typer until one runs."""

# ruff: noqa: D301 - a backspace is click's mark for a paragraph that is not wrapped anew, so no docstring here is raw.

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import exit_with

_DEFAULT = Path("authority")
_Authority = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The authority's folder.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    certs = typer.Typer(
        help="Make an authority and short-lived certificates that name their holders' roles.", no_args_is_help=True
    )
    certs.command("init")(init)
    certs.command("issue")(issue)
    certs.command("list")(list_certificates)
    app.add_typer(certs, name="certs")


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to make it in.")] = _DEFAULT,
    name: Annotated[str, typer.Option("--name", help="Its name, for people.")] = "Penstock",
    days: Annotated[int, typer.Option("--days", help="How long it signs.")] = 3650,
) -> None:
    """Make an authority: ca.pem, which everybody trusts, and ca-key.pem, which never leaves this folder.

    \b
    Examples:
      penstock certs init
      penstock certs init ~/authority --name "Penstock of team A" --days 730
    """

    def work() -> int:
        from console.certs.commands import init_command

        return init_command(folder, name=name, days=days)

    exit_with(work)


def issue(  # noqa: PLR0913, PLR0917 - one argument for each option
    roles: Annotated[
        list[str],
        typer.Argument(
            metavar="ROLE...", help="operator, trainer, generator, reward, environment, observer or broker."
        ),
    ],
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="Run id it is for; '*' for any.")],
    site: Annotated[str, typer.Option("--site", metavar="SITE", help="Site it is for; '*' for any.")],
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
    days: Annotated[int | None, typer.Option("--days", help="Valid for so many days; 30 without.")] = None,
    valid: Annotated[
        str | None, typer.Option("--valid", metavar="TIME", help="The same in s, m, h or d: 1m, 12h, 7d.")
    ] = None,
    directory: _Authority = _DEFAULT,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Folder to write to; DIR/issued/NAME without.")
    ] = None,
    at: Annotated[
        Path | None,
        typer.Option("--at", metavar="FOLDER", help="Where that folder will lie on its holder's machine, for `env`."),
    ] = None,
) -> None:
    """Issue a certificate, with a key of its own: ca.pem, cert.pem, key.pem and env in one folder for one holder.

    Issued again to the same folder it is renewed: with a new key, each file replaced whole, the certificate last.
    Certificates are valid from five minutes before, for machines whose clocks are a little behind.

    \b
    Examples:
      penstock certs issue trainer --run math-7b --site fra --name trainer --host trainer.example.org
      penstock certs issue generator environment --run math-7b --site waw --name waw-0 --host 10.0.0.7 --valid 12h
      penstock certs issue operator --run '*' --site '*' --name anna --out ~/.penstock/tls
      penstock certs issue generator --run math-7b --site waw --name waw-1 --out waw-1 --at /etc/penstock
    """

    def work() -> int:
        from console.certs.commands import issue_command
        from console.certs.request import checked_request, read_validity

        request = checked_request(roles, run=run, site=site, name=name, hosts=hosts or ())
        validity = read_validity(days=days, valid=valid)
        return issue_command(request, validity=validity, directory=directory, out=out, at=at)

    exit_with(work)


def list_certificates(
    directory: _Authority = _DEFAULT,
    is_all: Annotated[
        bool, typer.Option("--all", help="Those too that have expired and were issued again since.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List what an authority has issued, oldest first, and when each expires.

    \b
    Examples:
      penstock certs list
      penstock certs list --dir ~/authority --all --json
    """

    def work() -> int:
        from console.certs.commands import list_command

        return list_command(directory, is_all=is_all, as_json=as_json)

    exit_with(work)
