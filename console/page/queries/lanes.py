"""Draws a run's time: a lane for each service, the life of one sample, and a step's critical path in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from console.page.files.metrics_table import MetricsTable
from console.page.files.span import CHUNK, LEASE, PUBLISH, Span
from console.page.files.trace_spans import SpanStore, StepSpan
from console.page.files.values import Answer, BadQuestionError, seconds, text

MAX_SPANS = 4000
MAX_LANES = 200
"""Drawn at once; `lane` asks for one of them."""
_KINDS = ("generator", "reward", "environment", "trainer", "broker")
_LEAST_SHARE, _LEAST_S = 0.01, 0.05
"""Parts of a step shorter than that are not named."""
_NO_TRACES = "without traces: the trainer's times by step; when in a step it waited is not recorded"
_STAGES = {
    "rl.sample.queue": "queued",
    LEASE: "leased",
    "rl.sample.turn": "decoding",
    "rl.sample.score": "scoring",
    "rl.sample.wait_for_training": "waiting",
}
_WAITS = {
    "acknowledging": "the broker's acknowledgement",
    "publishing": "weights to be published",
    "checkpointing": "a checkpoint",
    "critic": "the critic",
}
"""What the trainer waits for, by the cause that it records; other causes speak for themselves."""


def lanes(store: SpanStore, steps: MetricsTable, query: Mapping[str, str]) -> Answer:
    """Spans between `from` and `to`, by default all of the run; of `lane` only, or of the life of `sample`.

    Raises BadQuestionError.
    """
    store.refresh()
    if key := query.get("sample"):
        return _life(store, text(key, 400))
    found = _metric_lanes(steps) if store.is_empty else _traced(store)
    begin = float(found.starts.min()) if len(found.starts) else 0.0
    end = float(found.ends.max()) if len(found.ends) else 0.0
    low, high = seconds(query, "from"), seconds(query, "to")
    low, high = begin if low is None else low, end if high is None else high
    if high < low:
        raise BadQuestionError(f"to: {high:g} must not be before from, {low:g}")
    drawn, is_merged = found.between(low, high, text(query.get("lane"), 200))
    return {
        "from": low,
        "to": high,
        "begin": begin,
        "end": end,
        "lanes": drawn,
        "sentence": sentence(store, steps, low, high),
        "merged": is_merged or store.is_thinned,
        "indexed": round(store.read_share, 4),
        **({"note": _NO_TRACES} if store.is_empty else {}),
    }


class _Spans:
    """Spans as columns: starts and ends, float64[n]; lane, kind, label and sample key by number, int[4, n]."""

    def __init__(self, lanes: list[tuple[str, str]], texts: list[str], starts: Any, ends: Any, columns: Any) -> None:
        self.starts, self.ends = starts, ends
        self._lanes, self._texts, self._columns = lanes, texts, columns

    def between(self, low: float, high: float, only: str) -> tuple[list[Answer], bool]:
        """The lanes with their spans in that time, and whether any were merged."""
        order = sorted(
            range(len(self._lanes)), key=lambda lane: (_KINDS.index(self._lanes[lane][0]), self._lanes[lane])
        )
        order = [lane for lane in order if not only or self._lanes[lane][1] == only][:MAX_LANES]
        is_inside = (self.ends >= low) & (self.starts <= high)
        members = {lane: np.flatnonzero(is_inside & (self._columns[0] == lane)) for lane in order}
        total = sum(map(len, members.values()))
        resolution_s = 0.0 if total <= MAX_SPANS else (high - low) * 2 * max(1, len(order)) / MAX_SPANS
        drawn = [
            {
                "name": self._lanes[lane][1],
                "kind": self._lanes[lane][0],
                "spans": self._drawn(members[lane], resolution_s),
            }
            for lane in order
        ]
        return drawn, resolution_s > 0

    def _drawn(self, members: Any, resolution_s: float) -> list[list[Any]]:
        members = members[np.argsort(self.starts[members], kind="stable")]
        if not resolution_s:
            return [self._span(index) for index in members.tolist()]
        # Longer spans stay; the shorter ones in each stretch of `resolution_s` become one.
        bins = np.floor(self.starts[members] / resolution_s)
        is_long = self.ends[members] - self.starts[members] >= resolution_s
        spans: list[list[Any]] = [self._span(index) for index in members[is_long].tolist()]
        short = members[~is_long]
        edges = np.flatnonzero(np.diff(bins[~is_long], prepend=np.nan, append=np.nan))
        spans += [self._merged(short[begin:end]) for begin, end in pairwise(edges.tolist())]
        spans.sort(key=lambda span: float(span[0]))
        return spans

    def _span(self, index: int) -> list[Any]:
        _, kind, label, key = (self._texts[number] for number in (0, *self._columns[1:, index]))
        return [float(self.starts[index]), float(self.ends[index]), kind, label, key or None]

    def _merged(self, members: Any) -> list[Any]:
        if len(members) == 1:
            return self._span(int(members[0]))
        spent = np.bincount(self._columns[1, members], weights=self.ends[members] - self.starts[members] + 1e-9)
        kind = self._texts[int(spent.argmax())]
        return [float(self.starts[members].min()), float(self.ends[members].max()), kind, f"{len(members)} spans", None]


def _traced(store: SpanStore) -> _Spans:
    return _Spans(store.lanes, store.texts, *store.columns())


def _metric_lanes(steps: MetricsTable) -> _Spans:
    """The trainer's time by step as its metrics tell it: how long it waited, then how long it computed."""
    ends, lengths = steps.times, steps.column("time/step_s")
    idle = np.nan_to_num(np.minimum(steps.column("time/idle_s"), lengths))
    known = ~np.isnan(ends) & ~np.isnan(lengths)
    ends, lengths, idle, versions = ends[known], lengths[known], idle[known], steps.versions[known]
    texts = ["", "waiting", "computing", *(f"step {version:.0f}" for version in versions.tolist())]
    labels = np.arange(len(ends)) + 3
    nothing, ones = np.zeros(len(ends), np.int64), np.ones(len(ends), np.int64)
    columns = [np.stack([nothing, kind * ones, labels, nothing]) for kind in (1, 2)]
    middles = ends - lengths + idle
    return _Spans(
        [("trainer", "trainer")] if len(ends) else [],
        texts,
        np.concatenate([ends - lengths, middles]),
        np.concatenate([middles, ends]),
        np.concatenate(columns, axis=1),
    )


def _life(store: SpanStore, key: str) -> Answer:
    """One sample from its submission to the step that trained it, as far as it was traced."""
    spans = sorted(store.samples.get(key, []), key=lambda span: span.start_s)
    by_lane: dict[str, Answer] = {}
    for span in spans:
        if span.name not in _STAGES:
            continue
        lane = by_lane.setdefault(span.lane[1], {"name": span.lane[1], "kind": span.lane[0], "spans": []})
        lane["spans"] += [[*part, key] for part in _parts(span)]
    events: list[list[Any]] = [
        [at_s, name, {text(each, 100): value for each, value in attributes.items()}]
        for span in spans
        for at_s, name, attributes in span.events
    ]
    begin, end = (min(span.start_s for span in spans), max(span.end_s for span in spans)) if spans else (0.0, 0.0)
    return {
        "from": begin,
        "to": end,
        "begin": begin,
        "end": end,
        "lanes": list(by_lane.values()),
        "events": sorted(events, key=lambda event: event[0])[:MAX_SPANS],
        "sentence": None if spans else "this sample was not traced",
        "merged": False,
    }


def _parts(span: Span) -> list[tuple[float, float, str, str]]:
    """What a station of a sample's life consists of: a lease, of its chunks and of the time before the first one.

    Of a sample that was not sampled at its submission, the broker knows no chunks: all of the lease is one part.
    """
    chunks = sorted((at_s, attributes) for at_s, name, attributes in span.events if name == CHUNK)
    if span.name != LEASE or not chunks:
        return [(span.start_s, span.end_s, _STAGES[span.name], span.name.removeprefix("rl.sample."))]
    ends = [at_s for at_s, _ in chunks[1:]]
    parts = [(span.start_s, chunks[0][0], "waiting", "for its first token")]
    for (at_s, attributes), end_s in zip(chunks, [*ends, span.end_s], strict=True):
        version, num_tokens = attributes.get("rl.policy.version"), attributes.get("rl.tokens")
        parts.append((at_s, end_s, "decoding", f"{num_tokens} tokens of version {version}"))
    return [part for part in parts if part[1] >= part[0]]


def sentence(store: SpanStore, steps: MetricsTable, low: float, high: float) -> str | None:
    """What the newest step that ended between two times spent its time on; None if none did."""
    inside = (step for step in store.steps.values() if low <= step.span.end_s <= high)
    newest = max(inside, key=lambda step: step.span.end_s, default=None)
    return _of_metrics(steps, low, high) if newest is None else _of_traced(newest, store)


def _of_traced(step: StepSpan, store: SpanStore) -> str:
    length_s = step.span.end_s - step.span.start_s
    spent: dict[str, float] = {}
    own = [part for part in step.parts if part.name != PUBLISH]
    for part in step.parts:
        # Of publishing, mostly beside the next step, only what nothing else of the step covers is on its path.
        beside_s = 0.0 if part.name != PUBLISH else _covered_s(part, own)
        inside_s = max(0.0, min(part.end_s, step.span.end_s) - max(part.start_s, step.span.start_s))
        what = {"rl.train.compute": "computing", PUBLISH: "publishing weights"}.get(part.name) or _waiting(
            text(part.attributes.get("rl.waits_for"), 200)
        )
        spent[what] = spent.get(what, 0.0) + max(0.0, inside_s - beside_s)
    version = step.span.attributes.get("rl.policy.version")
    named = f"Step {version}" if version is not None else "The step"
    words = [
        f"{duration_s:.1f} s {what}{_share(duration_s, length_s)}"
        for what, duration_s in sorted(spent.items(), key=lambda item: -item[1])[:4]
        if duration_s >= max(_LEAST_S, _LEAST_SHARE * length_s)
    ]
    last = _ended_last(step, store)
    return f"{named} took {length_s:.1f} s: {', '.join(words) or 'nothing of it is traced'}.{last}"


def _waiting(cause: str) -> str:
    return f"waiting for {_WAITS.get(cause, cause)}" if cause else "waiting"


def _covered_s(span: Span, others: Sequence[Span]) -> float:
    """How long at least one of other spans went on meanwhile."""
    covered_s, reached_s = 0.0, span.start_s
    for other in sorted(others, key=lambda each: each.start_s):
        begin_s, end_s = max(other.start_s, reached_s), min(other.end_s, span.end_s)
        if end_s > begin_s:
            covered_s, reached_s = covered_s + end_s - begin_s, end_s
    return covered_s


def _ended_last(step: StepSpan, store: SpanStore) -> str:
    """What the longest wait ended with: the traced sample that finished last in it."""
    waits = [part for part in step.parts if part.name == "rl.train.wait"]
    longest = max(waits, key=lambda part: part.end_s - part.start_s, default=None)
    if longest is None or longest.end_s - longest.start_s < 0.2 * (step.span.end_s - step.span.start_s):
        return ""
    last: Span | None = None
    for spans in store.samples.values():
        for span in spans:
            is_inside = span.name == "rl.sample.generate" and longest.start_s <= span.end_s <= longest.end_s
            if is_inside and (last is None or span.end_s > last.end_s):
                last = span
    return (
        ""
        if last is None
        else f" Of the traced samples {last.sample_key} on {last.lane[1]} ended last in its longest wait."
    )


def _of_metrics(steps: MetricsTable, low: float, high: float) -> str | None:
    times = steps.times
    inside = np.flatnonzero((times >= low - 1e-6) & (times <= high + 1e-6))
    if not len(inside):
        return None
    index = int(inside[-1])
    length_s = float(steps.column("time/step_s")[index])
    spent = {"computing": float(steps.column("time/train_s")[index])}
    for name in steps.names:
        if name.startswith("wait/") and name.endswith("_s"):
            spent[_waiting(name[5:-2])] = float(steps.column(name)[index])
    least_s = max(_LEAST_S, _LEAST_SHARE * length_s)
    longest = sorted(((value, what) for what, value in spent.items() if value >= least_s), reverse=True)[:4]
    if not longest or np.isnan(length_s):
        return None
    words = ", ".join(f"{value:.1f} s {what}{_share(value, length_s)}" for value, what in longest)
    return f"Step {steps.versions[index]:.0f} took {length_s:.1f} s: {words}."


def _share(part: float, whole: float) -> str:
    return f" ({100 * part / whole:.0f} %)" if whole > 0 else ""
