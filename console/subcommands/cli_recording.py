"""The commands that record, replay and rescore: names, options and help. Imports nothing but typer until one runs."""

# ruff: noqa: D301 - a backspace is click's mark for a paragraph that is not wrapped anew, so no docstring here is raw.

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import Broker, RunArgument, RunsDir, exit_with


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (export, replay, rescore):
        app.command()(command)


def export(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Recording to write: .jsonl or .parquet.")],
    run: RunArgument = None,
    broker: Broker = None,
    directory: RunsDir = Path("runs"),
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with each step until the run is closed.")
    ] = False,
    from_version: Annotated[int, typer.Option("--from-version", min=0, help="First step; 0: the oldest retained.")] = 0,
    max_bytes: Annotated[
        int | None,
        typer.Option("--max-bytes", min=1, help="With --follow: from this size on, go on in FILE-00002 and so on."),
    ] = None,
) -> None:
    """Record a run's trained trajectories, one row a sample; docs/recording.md describes the columns.

    With --follow an existing recording of the same run is gone on with. Ctrl-C ends a recording that is whole.

    \b
    Examples:
      penstock export --out trajectories.parquet
      penstock export my-run --broker broker:7301 --out my-run.jsonl --follow
    """

    def work() -> int:
        from console.trajectories.export_recording import export_command

        return export_command(
            run,
            out=out,
            follow=follow,
            from_version=from_version,
            broker=broker,
            runs_dir=directory,
            max_bytes=max_bytes,
        )

    exit_with(work)


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording: .jsonl or .parquet.")],
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="Id of the run that gets the groups; it is open.")],
    broker: Annotated[str, typer.Option("--broker", metavar="HOST:PORT", help="Its broker.")],
    from_offset: Annotated[int, typer.Option("--from-offset", min=0, help="Groups to leave out first.")] = 0,
    from_version: Annotated[int, typer.Option("--from-version", min=0, help="First step to replay.")] = 0,
    prefix: Annotated[str, typer.Option("--prefix", help="Stands before the groups' names.")] = "replay-",
) -> None:
    """Put a recording's groups into another run, in order, for its trainer to train on.

    A group keeps its staleness: its policy versions move with the run's. Log-probs stay as they were recorded. Never
    more than one step's worth of groups waits. Exit status 1 when a group could not be put.

    \b
    Example:
      penstock replay my-run.parquet --run second --broker broker:7301 --from-version 10
    """

    def work() -> int:
        from console.trajectories.replay_recording import ReplayOptions, replay_command

        options = ReplayOptions(run_id=run, prefix=prefix, from_offset=from_offset, from_version=from_version)
        return replay_command(file, options, broker=broker)

    exit_with(work)


def rescore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording: .jsonl or .parquet.")],
    reward: Annotated[
        str, typer.Option("--reward", metavar="MODEL", help="HOST:PORT, module:function, or a built-in name.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Recording to write: .jsonl or .parquet.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="DIR", help="Decode token ids by this model's; else its text is judged."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as one JSON document.")] = False,
) -> None:
    """Score every sample of a recording by another reward model; the old score stays beside the new one.

    \b
    Examples:
      penstock rescore my-run.parquet --reward exact_match --out exact.parquet
      penstock rescore my-run.jsonl --reward 127.0.0.1:7310 --out judged.jsonl
    """

    def work() -> int:
        from console.trajectories.rescore_recording import rescore_command

        return rescore_command(file, reward=reward, out=out, tokenizer=tokenizer, as_json=as_json)

    exit_with(work)
