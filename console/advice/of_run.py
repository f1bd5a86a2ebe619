"""Gives the advice on a run: at its end by its summary, under way by its folder and the broker's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from console.advice.measured import Occupancy, measure
from console.advice.rules import Advice, advise
from penstock.v1 import broker_pb2
from penstock.wire.audit_json import audit_document


def final_advice(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[Advice]:
    """The advice on a run that has ended, or was cut short.

    Args:
        lines: Of metrics.jsonl, oldest first.
        summary: Of summary.json; what it lacks counts as not measured.
    """
    return advise(
        measure(
            lines,
            occupancy=summary.get("occupancy"),
            audit=summary.get("audit"),
            max_staleness=summary.get("max_staleness"),
        )
    )


def live_advice(
    lines: Sequence[Mapping[str, Any]], run: broker_pb2.GetRunResponse, *, idle_ratio: float | None
) -> list[Advice]:
    """The advice on a run under way; the broker's answer counts as it is now, without a history."""
    occupancy = Occupancy()
    occupancy.add(run.audit.in_flight_by_state, num_generators=len(run.generators), idle_ratio=idle_ratio)
    return advise(
        measure(
            lines,
            occupancy=occupancy.document(),
            audit=audit_document(run.audit),
            max_staleness=run.limits.max_staleness,
        )
    )
