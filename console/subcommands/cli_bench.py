"""Defines `penstock bench NAME`, which runs a suite of `benchmarks/` with its own options, targets and table."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import command, end_by_sigterm

_SOURCE = Path(__file__).resolve().parents[2]
_NOT_INSTALLED = "bench: the suites are not part of the installed package; run `penstock bench` from a source checkout"

app = typer.Typer()


def _suites() -> dict[str, str]:
    """The suites in `benchmarks`; empty if that is not beside this package."""
    listed = _SOURCE / "benchmarks" / "__init__.py"
    return dict(runpy.run_path(str(listed))["SUITES"]) if listed.is_file() else {}


def _listed() -> str:
    lines = [f"  {name:<25}{what}" for name, what in _suites().items()]
    return "\n".join(("\b", "Suites:", *lines)) if lines else _NOT_INSTALLED


@command(app, epilog=_listed(), context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME [OPTIONS]", help="A suite and its options; `penstock bench NAME --help`."),
    ] = None,
) -> int:
    """Measure a part of Penstock on this machine, in separate processes; takes minutes.

    Examples:
      penstock bench broker
      penstock bench broker --peers --json
      penstock bench e2e --quick
      penstock bench weights --engine vllm
    """
    from penstock.config import ConfigError

    suites, words = _suites(), arguments or []
    if not suites:
        raise ConfigError(_NOT_INSTALLED)
    # Options may also precede the name.
    name = next((word for word in words if word in suites), None)
    if name is None:
        asked = next((f"{word!r} is not known" for word in words if not word.startswith("-")), "name a suite")
        raise ConfigError(f"bench: {asked}; suites: {', '.join(suites)}")
    words.remove(name)
    end_by_sigterm()
    return _run(name, words)


def _run(name: str, words: list[str]) -> int:
    sys.path.insert(0, str(_SOURCE))
    # Child processes of the suite import it, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_SOURCE), os.environ.get("PYTHONPATH"))))
    sys.argv = [f"penstock bench {name}", *words]
    is_folder = _SOURCE.joinpath("benchmarks", *name.split(".")).is_dir()
    return importlib.import_module(f"benchmarks.{name}" + ".__main__" * is_folder).main() or 0
