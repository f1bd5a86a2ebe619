"""What the parts of the `penstock` command share: common options, and how a command ends. Imports nothing but typer."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

EXIT_USER_MISTAKE, EXIT_INTERRUPTED = 2, 130

RunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Run folder, or run id with --broker. Default: the newest run.")
]
RunsDir = Annotated[Path, typer.Option("--dir", help="Folder that holds run folders.")]
Broker = Annotated[str | None, typer.Option("--broker", metavar="HOST:PORT,...", help="Broker to ask; or several.")]


def end_by_sigterm() -> None:
    """From now on SIGTERM ends the command, which cleans up, as Ctrl-C does.

    As a signal, not by raising: where asyncio runs it cancels the main task, while an exception in the midst of what
    gRPC sets up ends the process with a segmentation fault.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script's background job begins so, and there SIGTERM would be passed on to nobody.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))


def exit_with(work: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its status; a mistake of the user is told in a line each."""
    # gRPC's core writes lines of its own to stderr whenever a peer goes away; that is told in our words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import structlog

    from console.view.closed_output import discard
    from penstock.config import ConfigError

    if not structlog.is_configured():
        # What a command prints may be read by a program.
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        status = work()
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
