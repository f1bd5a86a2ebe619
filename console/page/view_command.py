"""Implements `penstock view`: the page of runs, from their folders, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from console.config.run_folder import RunFolder, is_there
from console.inspect.find_run import find_run
from console.page.broker_watch import BrokerWatch
from console.page.run_data import RunData
from console.page.server import serving_page
from penstock.config import ConfigError
from penstock.names import is_run_id
from penstock.network.rpc import PortUnavailableError
from penstock.process.signals import StopSignals
from penstock.process.tasks import end
from penstock.security import Security
from penstock.targets import checked_addresses

MAX_RUNS = 16


def view_command(runs: Sequence[str], *, listen: str, broker: str | None) -> int:
    """Serve the page until a signal comes; returns the exit status. Raises ConfigError.

    Args:
        runs: Run folders; with a broker also ids of runs that have none here.
        listen: host:port.
        broker: host:port of the broker that knows the runs; None to ask those that their folders name.
    """
    if len(runs) > MAX_RUNS:
        raise ConfigError(f"RUN_DIR: {len(runs)} runs; at most {MAX_RUNS} side by side")
    _check_listen(listen)
    watches = [_watch(run, broker) for run in runs]
    shown = [
        RunData(RunFolder(Path(run).expanduser().absolute()), live=watch if watch is not None else lambda: None)
        for run, watch in zip(runs, watches, strict=True)
    ]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(shown, [watch for watch in watches if watch is not None], listen))
    return 0


async def _serve(shown: Sequence[RunData], watches: Sequence[BrokerWatch], listen: str) -> None:
    security = Security.from_environment()
    following = [asyncio.create_task(watch.follow()) for watch in watches]
    try:
        with StopSignals() as signals:
            async with serving_page(shown, listen, security=security, setting="--listen") as link:
                print(f"page: {link}\nCtrl-C ends it", flush=True)
                await signals.requested.wait()
    except PortUnavailableError as error:
        raise ConfigError(str(error)) from error
    finally:
        await end(*following)


def _watch(run: str, broker: str | None) -> BrokerWatch | None:
    """What is asked for the state of a run. Raises ConfigError if there is no such run."""
    path = Path(run).expanduser()
    is_folder = is_there(path) and path.is_dir()
    if broker is not None:
        if not is_folder and not is_run_id(run):
            raise ConfigError(f"RUN_DIR: {run!r}: neither a folder nor a run's id")
        return BrokerWatch(_checked(broker, "--broker"), path.name)
    if not is_folder:
        raise ConfigError(f"RUN_DIR: {run}: no such folder; name a run's folder, or its broker with --broker")
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "summary.json")):
        raise ConfigError(f"RUN_DIR: {run}: not a run folder (it holds no config.yaml, metrics.jsonl or summary.json)")
    try:
        target = find_run(run, broker=None, runs_dir=Path("runs"))
    except ConfigError:
        # A folder whose configuration is damaged, or of another version, is shown all the same.
        return None
    return None if target.broker is None else BrokerWatch(target.broker, target.run_id)


def _check_listen(listen: str) -> None:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen: {listen!r}: write HOST:PORT, for example 127.0.0.1:8080; port 0 is a free one")


def _checked(addresses: str, option: str) -> str:
    try:
        return checked_addresses(addresses)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
