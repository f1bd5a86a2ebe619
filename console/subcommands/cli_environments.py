"""Defines `penstock env`: names, options and help. Imports nothing but typer until one runs."""

from __future__ import annotations

from typing import Annotated

import typer

from console.subcommands.cli_common import command

app = typer.Typer(name="env", help="Serve and check environments.", no_args_is_help=True)


@command(app)
def serve(
    target: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="A Python environment.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on.")
    ] = "127.0.0.1:7320",
    metrics_listen: Annotated[
        str | None, typer.Option("--metrics-listen", metavar="HOST:PORT", help="Address of its Prometheus metrics.")
    ] = None,
    max_sessions: Annotated[int, typer.Option("--max-sessions", min=1, help="Limit on open sessions.")] = 1024,
    max_idle_s: Annotated[
        float, typer.Option("--max-idle-s", min=1, help="Close a session after this many seconds without a call.")
    ] = 1800.0,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option("--log-format", help="text or json.")] = "text",
) -> None:
    """Serve a Python class as an environment; a run uses it as environment=grpc://HOST:PORT.

    Example:
      penstock env serve my_environments:Countdown --listen 0.0.0.0:7320
    """
    from console.serve.environments import serve_environment

    serve_environment(
        target,
        listen=listen,
        metrics_listen=metrics_listen,
        max_sessions=max_sessions,
        max_idle_s=max_idle_s,
        level=log_level,
        log_format=log_format,
    )


@command(app)
def check(
    target: Annotated[str, typer.Argument(metavar="HOST:PORT", help="A running environment, in any language.")],
    row: Annotated[
        str, typer.Option("--row", metavar="JSON", help="A data row that it can play: prompt, answer, other columns.")
    ] = "{}",
    say: Annotated[
        list[str] | None, typer.Option("--say", metavar="TEXT", help="What the model says, turn by turn; repeatable.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="ID", help="Call on behalf of this run.  [default: the certificate's]"),
    ] = None,
) -> int:
    """Check that an environment keeps the contract; exit status 1 if it does not.

    Example:
      penstock env check 127.0.0.1:7320 --row '{"prompt": "guess", "answer": "7"}' --say 5 --say 7
    """
    from console.serve.environments import check_environment

    return check_environment(target, row=row, say=say or [], run_id=run)


@command(app, hidden=True)
def resolve(target: Annotated[str, typer.Argument(metavar="MODULE:CLASS")]) -> None:
    """Check that an environment's name can be loaded here; `penstock run` does so before it starts anything."""
    from console.serve.environments import resolve_environment

    resolve_environment(target)
