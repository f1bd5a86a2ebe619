"""What the parts of the `penstock` command share: common options, and how a command ends. Imports nothing but typer."""

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
RunsDir = Annotated[Path, typer.Option("--dir", help="Folder that holds run folders.")]
Broker = Annotated[str | None, typer.Option("--broker", metavar="HOST:PORT,...", help="Broker to ask; or several.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Recording = Annotated[Path, typer.Argument(metavar="FILE", help="A recording: .jsonl or .parquet.")]
NewRecording = Annotated[Path, typer.Option("--out", metavar="FILE", help="Recording to write: .jsonl or .parquet.")]
Problem = Annotated[Path, typer.Argument(metavar="PROBLEM", help="Cluster, model and workload: .yaml or .json.")]
CostModel = Annotated[
    str, typer.Option("--cost-model", help="rm1 (reference) or calibrated (fitted to published runs).")
]
PlanJson = Annotated[bool, typer.Option("--json", help="Print JSON; docs/planning.md describes it.")]


def end_by_sigterm() -> None:
    """From now on SIGTERM ends the command, which cleans up, as Ctrl-C does.

    As a signal, not by raising: where asyncio runs it cancels the main task, while an exception in the midst of what
    gRPC sets up ends the process with a segmentation fault.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script's background job begins so, and there SIGTERM would be passed on to nobody.
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

        # A backspace is click's mark for a paragraph that is not wrapped.
        text = re.sub(r"\n\n(?=Examples?:\n)", "\n\n\b\n", cleandoc(work.__doc__ or ""))
        app.command(name, help=text, **settings)(ending)
        return work

    return register


def _exit_with(work: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its status; a user's mistake is printed as one line each on stderr."""
    # gRPC's core writes lines of its own to stderr whenever a peer goes away; that is told in our words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import structlog

    from console.view.closed_output import discard
    from penstock.config import ConfigError

    if not structlog.is_configured():
        # What a command prints may be read by a program.
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
