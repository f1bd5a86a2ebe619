"""What `penstock status` does, and how commands find a run and ask its broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from console.config import checked_address, load_run_config
from console.folder import RunFolder, open_folder, read_record
from console.live import duration
from console.local import plain_console, run_folders
from penstock.config import ConfigError
from penstock.errors import PenstockError
from penstock.rpc import call, open_channel
from penstock.security import Security
from penstock.v1 import broker_pb2, broker_pb2_grpc

_TIMEOUT_S = 5.0
_Response = TypeVar("_Response")


class _Asked(TypedDict):
    peer: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run and the broker that knows it."""

    run_id: str
    broker: str | None
    """host:port; None when no broker of that run is known to be up."""
    folder: RunFolder | None
    """Its folder on this machine, when there is one."""


def status_command(run: str | None, *, broker: str | None, runs_dir: Path) -> int:
    """Print a run's picture; returns the exit status. Raises ConfigError."""
    target = find_run(run, broker=broker, runs_dir=runs_dir)
    if target.broker is None:
        raise ConfigError(f"{target.run_id}: not under way here; name its broker with --broker, or see its report")
    show_status(asyncio.run(_get_run(target.run_id, target.broker)), plain_console(), now_s=time.time())
    return 0


def find_run(run: str | None, *, broker: str | None, runs_dir: Path) -> Target:
    """The run that is meant: by folder, by id with a broker, else the newest one. Raises ConfigError."""
    if broker is not None:
        return Target(run_id=_id_at_broker(run, _address(broker)), broker=_address(broker), folder=None)
    if run is None:
        folders = run_folders(runs_dir)
        if not folders:
            raise ConfigError(f"{runs_dir}: holds no runs; name a run folder, or a broker with --broker")
        folder = folders[-1]
    else:
        path = Path(run)
        folder = open_folder(path if path.exists() else runs_dir / run)
    config = load_run_config(folder.config)
    record = read_record(folder.services / "broker.json")
    local = record.address if record is not None and record.is_alive else None
    return Target(run_id=config.run.id, broker=config.endpoints.broker or local, folder=folder)


def show_status(run: broker_pb2.GetRunResponse, console: Console, *, now_s: float) -> None:
    """Print the broker's picture of a run."""
    audit = run.audit
    by_state = audit.in_flight_by_state
    in_flight = "  ".join(f"{name} {by_state[name]}" for name in sorted(by_state)) or "none in flight"
    lines = [
        f"run {run.run_id} ({'closed' if run.is_closed else 'open'}), policy version {run.policy_version}",
        f"samples: {in_flight}",
        f"trained {audit.trained}, dropped {sum(audit.dropped.values())}, staleness at most {audit.max_staleness_seen}",
        f"reward workers: {', '.join(run.reward_worker_ids) or 'none connected'}",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    if run.generators:
        console.print(_generators_table(run.generators, now_s=now_s))
    else:
        console.print("generators: none connected")
    for wait in run.waits:
        console.print(Text(_wait_line(wait, now_s=now_s)), soft_wrap=True)


def _generators_table(generators: Sequence[broker_pb2.GeneratorView], *, now_s: float) -> Table:
    names = ("generator", "engine", "site", "version", "running", "tokens/s", "cache", "seen")
    table = Table(*names, box=None, pad_edge=False)
    for view in generators:
        beat = view.beat
        cells = (
            view.hello.generator_id,
            view.hello.engine,
            view.hello.site or "-",
            str(beat.policy_version),
            str(beat.num_running),
            f"{beat.tokens_per_second:.0f}",
            f"{100 * beat.kv_cache_usage:.0f} %",
            f"{max(0.0, now_s - view.beat_time.ToNanoseconds() / 1e9):.0f} s ago",
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _wait_line(wait: broker_pb2.Wait, *, now_s: float) -> str:
    since_s = now_s - wait.since_time.ToNanoseconds() / 1e9 if wait.HasField("since_time") else None
    since = f" for {duration(max(0.0, since_s))}" if since_s is not None else ""
    return f"{wait.waiter} waits for {wait.owner}{since}: {wait.reason}"


def _id_at_broker(run: str | None, broker: str) -> str:
    if run is not None:
        return Path(run).name
    ids = asyncio.run(_list_runs(broker))
    if not ids:
        raise ConfigError(f"the broker at {broker} knows no runs")
    return ids[-1]


async def _get_run(run_id: str, broker: str) -> broker_pb2.GetRunResponse:
    async with open_channel(broker, Security.from_environment()) as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        return await _told(call(stub.GetRun, broker_pb2.GetRunRequest(run_id=run_id), **_asked(broker)))


async def audit_run(run_id: str, broker: str) -> broker_pb2.Audit:
    """The books of a run, rows included. Raises ConfigError."""
    async with open_channel(broker, Security.from_environment()) as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        request = broker_pb2.AuditRunRequest(run_id=run_id)
        return (await _told(call(stub.AuditRun, request, **_asked(broker)))).audit


async def _list_runs(broker: str) -> list[str]:
    async with open_channel(broker, Security.from_environment()) as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        return list((await _told(call(stub.ListRuns, broker_pb2.ListRunsRequest(), **_asked(broker)))).run_ids)


def _asked(broker: str) -> _Asked:
    return {"peer": f"broker {broker}", "timeout_s": _TIMEOUT_S}


async def _told(answer: Awaitable[_Response]) -> _Response:
    try:
        return await answer
    except PenstockError as error:
        raise ConfigError(str(error)) from error


def _address(text: str) -> str:
    try:
        return checked_address(text)
    except ValueError as error:
        raise ConfigError(f"--broker: {error}") from error
