"""`penstock bench`: its options and help, and which command measures what."""

# ruff: noqa: D301 - a backspace is click's mark for a paragraph that is not wrapped anew, so no docstring here is raw.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import end_by_sigterm, exit_with


def register(app: typer.Typer) -> None:
    """Add `bench` to the command."""
    app.command()(bench)


def bench(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="broker, generator, ranker, weights, fleet or e2e.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run; its numbers mean nothing.")] = False,
    trl_python: Annotated[
        Path | None,
        typer.Option("--trl-python", metavar="PATH", help="e2e: a Python that has TRL; one is made in runs/ without."),
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="broker: PipelineRL's pattern, Reverb and TransferQueue beside it; environments are made in runs/.",
        ),
    ] = False,
    engine: Annotated[
        str | None, typer.Option(help="weights: whose pauses are measured, transformers (default) or vllm.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="PART", help="generator: updates, pressure or concurrency alone.")
    ] = None,
) -> None:
    """Measure a service, or with e2e a whole run next to TRL, with processes of its own; minutes.

    \b
    Examples:
      penstock bench broker
      penstock bench broker --json
      penstock bench broker --peers
      penstock bench generator
      penstock bench generator --only pressure
      penstock bench ranker
      penstock bench weights
      penstock bench weights --engine vllm
      penstock bench fleet
      penstock bench e2e
      penstock bench e2e --trl-python /opt/trl/bin/python --json
    """

    def work() -> int:
        from console.bench_broker import bench_broker_command
        from console.bench_e2e import bench_e2e_command
        from console.bench_fleet import bench_fleet_command
        from console.bench_generator import bench_generator_command
        from console.bench_ranker import bench_ranker_command
        from console.bench_weights import bench_weights_command
        from penstock.config import ConfigError

        commands: dict[str, Callable[..., int]] = {
            "broker": partial(bench_broker_command, with_peers=peers),
            "generator": partial(bench_generator_command, only=only),
            "ranker": bench_ranker_command,
            "weights": partial(bench_weights_command, engine=engine),
            "fleet": bench_fleet_command,
            "e2e": partial(bench_e2e_command, trl_python=trl_python),
        }
        if what not in commands:
            raise ConfigError(f"bench: {what!r} is not known; there is: {', '.join(commands)}")
        if trl_python is not None and what != "e2e":
            raise ConfigError(f"bench: --trl-python has no meaning for {what}")
        if peers and what != "broker":
            raise ConfigError(f"bench: --peers has no meaning for {what}")
        if engine is not None and what != "weights":
            raise ConfigError(f"bench: --engine has no meaning for {what}")
        if only is not None and what != "generator":
            raise ConfigError(f"bench: --only has no meaning for {what}")
        end_by_sigterm()
        return commands[what](is_json=json_output, is_quick=quick)

    exit_with(work)
