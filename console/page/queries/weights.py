"""Says where a run's weights are: its versions, which of them each machine holds, and what travelled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from console.page.files.metrics_table import MetricsTable
from console.page.files.trace_spans import PUBLISH, UPDATE, SpanStore
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
    publications = _publications(store)
    versions = [
        {
            "version": version,
            "digest": text(publications.get(version, {}).get("rl.weights.digest"), 200) or None,
            "bytes": count(publications.get(version, {}).get("rl.weights.bytes")) or size,
            "published_s": number(publications.get(version, {}).get("published_s")) or time_s,
        }
        for version, size, time_s in _from_metrics(steps)
    ]
    machines, links = _updates(store)
    if run is not None:
        for each in run.generators:
            name, held = each.hello.generator_id, each.beat.policy_version
            if machines.get(name, {}).get("version") != held:
                machines[name] = {"name": name, "version": held, "since_s": None, "beat_s": unix_s(each.beat_time)}
    return {
        "versions": versions,
        "machines": sorted(machines.values(), key=lambda each: each["name"])[:MAX_MACHINES],
        "links": [{"from": one, "to": other, "bytes": size} for (one, other), size in sorted(links.items())],
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


def _publications(store: SpanStore) -> dict[int, Mapping[str, Any]]:
    """What was traced of each publication, by version."""
    found: dict[int, Mapping[str, Any]] = {}
    for span in store.weights:
        version = count(span.attributes.get("rl.policy.version"))
        if span.name == PUBLISH and version is not None:
            found[version] = {**span.attributes, "published_s": span.end_s}
    return found


def _updates(store: SpanStore) -> tuple[dict[str, Answer], dict[tuple[str, str], int]]:
    """The newest version that each machine installed, and the bytes that came over each link, by the traces."""
    machines: dict[str, Answer] = {}
    links: dict[tuple[str, str], int] = {}
    for span in store.weights:
        if span.name != UPDATE:
            continue
        version = count(span.attributes.get("rl.policy.version"))
        name = span.lane[1]
        if version is not None and span.end_s >= machines.get(name, {}).get("since_s", 0.0):
            machines[name] = {"name": name, "version": version, "since_s": span.end_s}
        size = count(span.attributes.get("rl.weights.bytes")) or 0
        from_trainer = min(size, count(span.attributes.get("rl.weights.origin_bytes")) or 0)
        for source, part in (("trainer", from_trainer), ("its site", size - from_trainer)):
            if part:
                links[source, name] = links.get((source, name), 0) + part
    return machines, links
