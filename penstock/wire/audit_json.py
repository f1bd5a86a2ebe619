"""A run's counters as a JSON document: for summary.json and `penstock audit --json`."""

from __future__ import annotations

from typing import TypedDict

from penstock.v1 import broker_pb2


class RowDocument(TypedDict):
    """AuditRow."""

    submit_version: int
    max_tokens: int
    trained: int
    dropped: dict[str, int]
    in_flight: int


class SubmittedDocument(TypedDict):
    """SubmittedRow."""

    submit_version: int
    submitted: int


class AuditDocument(TypedDict):
    """Audit, in samples; see the proto for the meaning of its fields."""

    submitted: int
    trained: int
    dropped: dict[str, int]
    in_flight: int
    balanced: bool
    rows: list[RowDocument]
    submitted_by_version: list[SubmittedDocument]


def audit_document(audit: broker_pb2.Audit) -> AuditDocument:
    """The document, reasons in alphabetical order."""
    return {
        "submitted": audit.submitted,
        "trained": audit.trained,
        "dropped": dict(sorted(audit.dropped.items())),
        "in_flight": audit.in_flight,
        "balanced": audit.balanced,
        "rows": [
            {
                "submit_version": row.submit_version,
                "max_tokens": row.max_tokens,
                "trained": row.trained,
                "dropped": dict(sorted(row.dropped.items())),
                "in_flight": row.in_flight,
            }
            for row in audit.rows
        ],
        "submitted_by_version": [
            {"submit_version": row.submit_version, "submitted": row.submitted} for row in audit.submitted_by_version
        ],
    }
