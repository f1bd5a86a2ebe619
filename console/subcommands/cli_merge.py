"""Defines the command that merges a trained adapter into its base. Imports nothing but typer until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import command

app = typer.Typer()


@command(app)
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
    from services.trainer.model.backend import CheckpointMismatchError
    from services.trainer.model.merging import merge_adapter

    try:
        base = merge_adapter(checkpoint, out=out, base=model)
    except (CheckpointMismatchError, OSError, ValueError) as error:
        typer.echo(f"penstock: {error}", err=True)
        return 1
    typer.echo(f"{out}: {base} with the adapter of {checkpoint}")
    return 0
