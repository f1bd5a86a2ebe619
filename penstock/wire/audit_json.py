"""A run's counters as a JSON document: for summary.json and `penstock audit --json`."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from penstock.v1 import broker_pb2


def audit_document(audit: broker_pb2.Audit) -> dict[str, Any]:
    """The document, in samples, with agents' sessions if there were any; see Audit in the proto for its fields."""
    sessions = {"sessions": _fields(audit.sessions, "opened", "put", "dropped", "open")}
    return {
        **_fields(audit, "submitted", "trained", "dropped", "in_flight", "balanced"),
        "rows": [_fields(row, "submit_version", "max_tokens", "trained", "dropped", "in_flight") for row in audit.rows],
        "submitted_by_version": [_fields(row, "submit_version", "submitted") for row in audit.submitted_by_version],
        **(sessions if audit.HasField("sessions") else {}),
    }


def _fields(message: Message, *names: str) -> dict[str, Any]:
    """Fields of a message by name; of `dropped` a copy with its reasons in alphabetical order."""
    values = {name: getattr(message, name) for name in names}
    return {name: dict(sorted(value.items())) if name == "dropped" else value for name, value in values.items()}
