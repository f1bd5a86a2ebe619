"""Defines the commands on a run's recording and its adapter. Imports nothing but typer until one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import Broker, Json, NewRecording, Recording, RunArgument, RunsDir, command

app = typer.Typer()
merge_app = typer.Typer()


@command(app)
def export(
    out: NewRecording,
    run: RunArgument = None,
    broker: Broker = None,
    directory: RunsDir = Path("runs"),
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with each step until the run is closed.")
    ] = False,
    from_version: Annotated[int, typer.Option("--from-version", min=0, help="First step; 0: the oldest retained.")] = 0,
    max_bytes: Annotated[
        int | None,
        typer.Option("--max-bytes", min=1, help="With --follow: beyond this size, continue in FILE-00002 and so on."),
    ] = None,
) -> int:
    """Record a run's trained trajectories, one row per sample; docs/recording.md describes the columns.

    With --follow an existing recording of the same run is appended to. After Ctrl-C the recording is complete.

    Examples:
      penstock export --out trajectories.parquet
      penstock export my-run --broker broker:7301 --out my-run.jsonl --follow
    """
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


@command(app)
def replay(
    file: Recording,
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="Id of the open run that gets the groups.")],
    broker: Annotated[str, typer.Option("--broker", metavar="HOST:PORT", help="Its broker.")],
    from_offset: Annotated[int, typer.Option("--from-offset", min=0, help="Groups to skip first.")] = 0,
    from_version: Annotated[int, typer.Option("--from-version", min=0, help="First step to replay.")] = 0,
    prefix: Annotated[str, typer.Option("--prefix", help="Prefix of the groups' names.")] = "replay-",
) -> int:
    """Put a recording's groups into another run, in order, for its trainer to train on.

    A group keeps its staleness: its policy versions move with the run's. Log-probs stay as they were recorded. Never
    more than one step's worth of groups waits. Exit status 1 if a group could not be put.

    Example:
      penstock replay my-run.parquet --run second --broker broker:7301 --from-version 10
    """
    from console.trajectories.replay_recording import ReplayOptions, replay_command

    options = ReplayOptions(run_id=run, prefix=prefix, from_offset=from_offset, from_version=from_version)
    return replay_command(file, options, broker=broker)


@command(app)
def rescore(
    file: Recording,
    reward: Annotated[
        str,
        typer.Option(
            "--reward",
            metavar="MODEL",
            help="HOST:PORT, module:function, a built-in name, or a YAML file with a section reward.",
        ),
    ],
    out: NewRecording,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="DIR", help="Decode token ids with it; default: use the recorded text."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Score every sample of a recording by another reward model; the old score is kept beside the new one.

    Examples:
      penstock rescore my-run.parquet --reward exact_match --out exact.parquet
      penstock rescore my-run.jsonl --reward 127.0.0.1:7310 --out judged.jsonl
      penstock rescore my-run.jsonl --reward composed.yaml --out composed.jsonl
    """
    from console.trajectories.rescore_recording import rescore_command

    return rescore_command(file, reward=reward, out=out, tokenizer=tokenizer, as_json=as_json)


@command(merge_app)
def merge(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="checkpoints/step_N of a run with `lora`.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Hugging Face directory to write.")],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="The base; default: the model that was trained on.")
    ] = None,
) -> int:
    """Merge a trained LoRA adapter into its base: an ordinary Hugging Face directory. Exit status 1 if they do not fit.

    Examples:
      penstock merge runs/my-run/checkpoints/step_200 --out models/my-model-200
    """
    from penstock.config import ConfigError

    if not checkpoint.is_dir():
        raise ConfigError(f"CHECKPOINT: {checkpoint}: no such folder; name checkpoints/step_N of a run with `lora`")
    if out.exists():
        raise ConfigError(f"--out: {out}: exists already; name a new folder")
    from services.trainer.model.adapters.merging import merge_adapter
    from services.trainer.model.backend import CheckpointMismatchError

    try:
        base = merge_adapter(checkpoint, out=out, base=model)
    except (CheckpointMismatchError, OSError, ValueError) as error:
        typer.echo(f"penstock: {error}", err=True)
        return 1
    typer.echo(f"{out}: {base} with the adapter of {checkpoint}")
    return 0
