"""Implements `penstock runs`: lists, shows and deletes the runs in a broker's store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.timestamp_pb2 import Timestamp

from console.config.run_folder import is_there
from console.inspect.find_run import answer_of, find_run
from console.view.formats import duration, plain_console, plain_table
from console.view.outcome import audit_line
from penstock.clients.broker import BrokerClient
from penstock.config import ConfigError
from penstock.v1 import broker_pb2
from penstock.wire.audit_json import audit_document
from penstock.wire.timestamps import unix_s


def list_command(*, broker: str | None, runs_dir: Path, as_json: bool) -> int:
    """Print the runs, oldest first; returns the exit status. Raises ConfigError."""
    runs = answer_of(_broker(None, broker=broker, runs_dir=runs_dir), BrokerClient.run_summaries)
    if as_json:
        print(json.dumps([_summary_document(run) for run in runs], indent=2))
        return 0
    names = ("run", "state", "version", "last active", "records", "submitted", "trained", "dropped", "instance")
    rows = []
    for run in runs:
        counts = (run.num_records, run.submitted, run.trained, run.dropped)
        ago = f"{duration(max(0.0, time.time() - unix_s(run.active_time)))} ago"
        rows.append((run.run_id, _state(run), run.policy_version, ago, *counts, run.instance_id or "-"))
    plain_console().print(plain_table(names, rows))
    return 0


def show_command(run: str, *, broker: str | None, runs_dir: Path, as_json: bool) -> int:
    """Print a run as the broker knows it; returns the exit status. Raises ConfigError."""
    address = _broker(run, broker=broker, runs_dir=runs_dir)
    run_id = Path(run).name
    summaries = {summary.run_id: summary for summary in answer_of(address, BrokerClient.run_summaries)}
    if run_id not in summaries:
        raise ConfigError(f"run_id: the broker at {address} knows no run {run_id!r}; see penstock runs list")
    details = answer_of(address, lambda client: client.get_run(run_id))
    if as_json:
        print(json.dumps(_document(summaries[run_id], details), indent=2))
    else:
        for line in _lines(summaries[run_id], details):
            print(line)
    return 0


def delete_command(run: str, *, broker: str | None, runs_dir: Path, is_forced: bool) -> int:
    """Delete a run from the broker's store; returns the exit status. Raises ConfigError."""
    address = _broker(run, broker=broker, runs_dir=runs_dir)
    run_id = Path(run).name
    existed, num_keys = answer_of(address, lambda client: client.delete_run(run_id, force=is_forced))
    print(f"{run_id}: {f'deleted, {num_keys} keys and records' if existed else 'nothing to delete'}")
    return 0


def _broker(run: str | None, *, broker: str | None, runs_dir: Path) -> str:
    """The broker to ask: the named one, or that of a run under way here."""
    if broker is not None:
        return find_run(run or "any", broker=broker, runs_dir=runs_dir).broker or broker
    is_here = run is None or is_there(Path(run)) or is_there(runs_dir / run)
    target = find_run(run if is_here else None, broker=None, runs_dir=runs_dir)
    if target.broker is None:
        raise ConfigError(f"{target.run_id}: not under way here; name the broker with --broker")
    return target.broker


def _state(run: broker_pb2.RunSummary) -> str:
    if run.payload_gone:
        return "being deleted" if run.payload_gone == "deleted" else f"closed, {run.payload_gone}"
    return "closed" if run.is_closed else "open"


def _lines(summary: broker_pb2.RunSummary, details: broker_pb2.GetRunResponse) -> Iterator[str]:
    yield f"run          {summary.run_id}"
    yield f"instance     {summary.instance_id or '-'}"
    yield f"state        {_state(summary)}"
    yield f"version      {summary.policy_version}"
    if details.owner.owner_id:
        since = f", since {_time(details.owner_time)}" if details.HasField("owner_time") else ""
        yield f"trainer      {details.owner.owner_id} (epoch {details.owner.epoch}{since})"
    yield f"opened       {_time(summary.open_time)}"
    yield f"last active  {_time(summary.active_time)}"
    yield f"records      {summary.num_records}"
    yield f"audit        {audit_line(audit_document(details.audit))}"
    for name, message in (("limits", details.limits), ("policy", details.policy)):
        fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        yield f"{name:<12} " + ", ".join(f"{field} {value}" for field, value in fields.items())


def _document(summary: broker_pb2.RunSummary, details: broker_pb2.GetRunResponse) -> dict[str, Any]:
    return _summary_document(summary) | {
        "owner_id": details.owner.owner_id,
        "epoch": details.owner.epoch,
        "limits": MessageToDict(details.limits, preserving_proto_field_name=True),
        "policy": MessageToDict(details.policy, preserving_proto_field_name=True),
        "audit": audit_document(details.audit),
    }


def _summary_document(run: broker_pb2.RunSummary) -> dict[str, Any]:
    """A run as JSON; times are Unix seconds."""
    return {
        "run_id": run.run_id,
        "instance_id": run.instance_id,
        "policy_version": run.policy_version,
        "is_closed": run.is_closed,
        "payload_gone": run.payload_gone or None,
        "open_s": unix_s(run.open_time),
        "active_s": unix_s(run.active_time),
        "num_records": run.num_records,
        "submitted": run.submitted,
        "trained": run.trained,
        "dropped": run.dropped,
    }


def _time(stamp: Timestamp) -> str:
    return f"{datetime.fromtimestamp(unix_s(stamp), tz=UTC):%Y-%m-%d %H:%M:%S} UTC"
