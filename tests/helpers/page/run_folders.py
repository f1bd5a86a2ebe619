"""Run folders for the page: metrics, recordings and traces as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from console.config.run_folder import RunFolder
from console.recording.recorded_sample import Recorded
from console.recording.writer import open_writer

BEGIN_S = 1_700_000_000.0


def page_folder(path: Path, *, num_steps: int = 3, step_s: float = 10.0) -> RunFolder:
    """A folder with a configuration, metrics of so many steps and two evaluations."""
    folder = RunFolder(path)
    folder.create()
    folder.config.write_text(f"run: {{id: {path.name}, num_steps: {num_steps}}}\n", encoding="utf-8")
    folder.metrics.write_text("".join(metrics_line(version, step_s) for version in range(1, num_steps + 1)))
    lines = [{"policy_version": version, "time": BEGIN_S, "greedy_accuracy": 0.5} for version in (0, num_steps)]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def metrics_line(version: int, step_s: float = 10.0, **more: float) -> str:
    """A line of metrics.jsonl."""
    line = {
        "policy_version": version,
        "time": BEGIN_S + version * step_s,
        "reward/mean": version / 10,
        "time/step_s": step_s,
        "time/idle_s": 0.25 * step_s,
        "time/train_s": 0.75 * step_s,
        "step/samples": 8.0,
        "step/response_tokens": 100.0,
        "wait/samples_s": 0.25 * step_s,
        **more,
    }
    return json.dumps(line) + "\n"


def write_recording(path: Path, samples: Sequence[Recorded], *, max_bytes: int | None = None) -> None:
    """A recording of samples, a step at a time."""
    writer = open_writer(path, is_followed=True, max_bytes=max_bytes)
    for sample in samples:
        writer.write([sample])
        writer.end_step()
    writer.close()


def trace_line(service: str, instance: str, *spans: Mapping[str, Any]) -> str:
    """A line of traces.jsonl: spans of one process, each with a name, a start and an end (seconds since BEGIN_S)."""
    resource = {"service.name": service, "service.instance.id": instance, "rl.run.id": "r"}
    made = [_span(**span) for span in spans]
    group = {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"spans": made}]}
    return json.dumps({"resourceSpans": [group]}) + "\n"


def _span(*, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    events = [
        {"name": each, "timeUnixNano": _nanos(at), "attributes": _attributes(attributes)}
        for at, each, attributes in more.get("events", ())
    ]
    return {
        "traceId": "0" * 32,
        "spanId": more.get("id", "1"),
        "parentSpanId": more.get("parent", ""),
        "name": name,
        "startTimeUnixNano": _nanos(start),
        "endTimeUnixNano": _nanos(end),
        "attributes": _attributes(more.get("attributes", {})),
        "events": events,
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
    ]


def _nanos(offset_s: float) -> str:
    return str(round((BEGIN_S + offset_s) * 1e9))
