"""Shares common options and the handling of exits among the `penstock` commands. Imports nothing but typer."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial, wraps
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

P = ParamSpec("P")

EXIT_USER_MISTAKE, EXIT_INTERRUPTED = 2, 130

RunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Run folder, or run id with --broker. Default: the newest run.")
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder.")]
RunsDir = Annotated[Path, typer.Option("--dir", help="Folder of run folders.")]
Broker = Annotated[str | None, typer.Option("--broker", metavar="HOST:PORT,...", help="One or more brokers to ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Recording = Annotated[Path, typer.Argument(metavar="FILE", help="A recording: .jsonl or .parquet.")]
NewRecording = Annotated[Path, typer.Option("--out", metavar="FILE", help="Recording to write: .jsonl or .parquet.")]
Problem = Annotated[Path, typer.Argument(metavar="PROBLEM", help="Cluster, model and workload: .yaml or .json.")]
NoticeFile = Annotated[
    Path | None, typer.Option("--notice-file", metavar="PATH", help="Drain and end, as on SIGTERM, once it exists.")
]
NoticeUrl = Annotated[
    str | None,
    typer.Option(
        "--notice-url",
        metavar="URL|aws|gcp|azure",
        help="The same once it answers with status 200, or that cloud's metadata server announces this machine's end.",
    ),
]
CostModel = Annotated[
    str, typer.Option("--cost-model", help="rm1 (reference) or calibrated (fitted to published runs).")
]
PlanJson = Annotated[bool, typer.Option("--json", help="Print JSON; docs/planning.md describes it.")]


def end_by_sigterm() -> None:
    """Make SIGTERM end the command like Ctrl-C, with cleanup.

    It raises a signal, not an exception: under asyncio the signal cancels the main task, while an exception during
    gRPC's setup ends the process with a segmentation fault.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script's background job starts with SIGINT ignored, so forwarding SIGTERM would have no effect.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))


def command(
    app: typer.Typer, name: str | None = None, **settings: Any
) -> Callable[[Callable[P, int | None]], Callable[P, int | None]]:
    """Make a function a command of `app`, which ends the process with the status that it returns (None: 0).

    Its docstring is the help; the lines of its examples are not wrapped.
    """

    def register(work: Callable[P, int | None]) -> Callable[P, int | None]:
        @wraps(work)
        def ending(*args: P.args, **kwargs: P.kwargs) -> None:
            _exit_with(partial(work, *args, **kwargs))

        # A backspace is click's mark for an unwrapped paragraph.
        text = re.sub(r"\n\n(?=Examples?:\n)", "\n\n\b\n", cleandoc(work.__doc__ or ""))
        app.command(name, help=text, **settings)(ending)
        return work

    return register


def _exit_with(work: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its status; user errors are printed on stderr, one line each."""
    # gRPC's core writes to stderr whenever a peer goes away; the command reports that itself.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import structlog

    from console.view.closed_output import discard
    from penstock.config import ConfigError

    if not structlog.is_configured():
        # The output may be read by a program.
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        status = work() or 0
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"penstock: {line}", file=sys.stderr)
        status = EXIT_USER_MISTAKE
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        discard(sys.stdout)
        status = 1
    raise SystemExit(status)
