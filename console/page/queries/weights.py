"""Says where a run's weights are: its versions, which of them each machine holds, and what travelled."""

from __future__ import annotations

import math

from console.page.files.metrics_table import MetricsTable
from console.page.files.span import Span
from console.page.files.trace_spans import SpanStore
from console.page.files.values import Answer, count, number, text
from penstock.v1 import broker_pb2
from penstock.wire.timestamps import unix_s

MAX_VERSIONS = 500
"""The newest ones."""
MAX_MACHINES = 1000


def weights(store: SpanStore, steps: MetricsTable, run: broker_pb2.GetRunResponse | None) -> Answer:
    """Versions with their digests and sizes; machines with the version that they hold and since when; links with bytes.

    What nothing recorded tells is null: digests and links need traces, machines need traces or the broker.
    """
    store.refresh()
    versions = [
        _version(version, size, time_s, store.weights.publications.get(version))
        for version, size, time_s in _from_metrics(steps)
    ]
    machines: dict[str, Answer] = {
        name: {"name": name, "version": count(span.attributes.get("rl.policy.version")), "since_s": span.end_s}
        for name, span in store.weights.installed.items()
    }
    if run is not None:
        for each in run.generators:
            name, held = each.hello.generator_id, each.beat.policy_version
            if machines.get(name, {}).get("version") != held:
                machines[name] = {"name": name, "version": held, "since_s": None, "beat_s": unix_s(each.beat_time)}
    return {
        "versions": versions,
        "machines": sorted(machines.values(), key=lambda each: each["name"])[:MAX_MACHINES],
        "links": [
            {"from": one, "to": other, "bytes": size} for (one, other), size in sorted(store.weights.link_bytes.items())
        ],
    }


def _version(version: int, size: int | None, time_s: float | None, traced: Span | None) -> Answer:
    attributes = {} if traced is None else traced.attributes
    return {
        "version": version,
        "digest": text(attributes.get("rl.weights.digest"), 200) or None,
        "bytes": count(attributes.get("rl.weights.bytes")) or size,
        "published_s": time_s if traced is None else traced.end_s,
    }


def _from_metrics(steps: MetricsTable) -> list[tuple[int, int | None, float | None]]:
    """Version, size of its publication and time of each of the newest steps; a size is reported with a later one."""
    sizes = steps.column("publish/bytes")[-MAX_VERSIONS:].tolist()
    times, versions = steps.times[-MAX_VERSIONS:].tolist(), steps.versions[-MAX_VERSIONS:].tolist()
    # A step's line tells of the version offered last, which is that of the step before.
    later = [*sizes, math.nan][1:]
    return [
        (int(version), None if math.isnan(size) else int(size), number(time_s))
        for version, size, time_s in zip(versions, later, times, strict=True)
    ]
