"""Reads a run's traces (OTLP JSON, a TracesData object a line) into spans, in bounded memory and as they grow."""

from __future__ import annotations

import json
import re
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from console.page.files.growing_file import GrowingFile
from console.page.files.values import mapping, text

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_SPANS = 400_000
"""Activities of services that are held, some 35 bytes each; beyond it the shorter half of them is forgotten."""
MAX_SAMPLES, MAX_SPANS_OF_SAMPLE = 5000, 200
MAX_SPANS_OF_SAMPLES = 25_000
"""Spans of all samples together, some 1 kB each; beyond it the samples read first are forgotten."""
MAX_STEPS = 20_000
MAX_FILES = 64
BUDGET_S = 1.0
_MAX_TEXTS = 200_000
_NAME = re.compile(r"traces(-\d{5})?\.jsonl")

UPDATE, PUBLISH, STEP = "rl.weights.update", "rl.weights.publish", "rl.train.step"
LEASE, CHUNK = "rl.sample.generate", "chunk"
KINDS = {
    "rl.generator.decode": "decoding",
    LEASE: "leased",
    UPDATE: "updating",
    "rl.reward.score": "scoring",
    "rl.environment.work": "environment",
    "rl.train.wait": "waiting",
    "rl.train.compute": "computing",
    PUBLISH: "publishing",
}
"""What a service does, by the name of its span."""
SAMPLE_PREFIXES = ("rl.sample", "rl.group")
_LANES = ("generator", "reward", "environment", "trainer", "broker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span as it is written."""

    name: str
    span_id: str
    parent_id: str
    start_s: float
    """Unix seconds."""
    end_s: float
    lane: tuple[str, str]
    """Kind of the service, and its name."""
    attributes: Mapping[str, Any]
    events: Sequence[tuple[float, str, Mapping[str, Any]]] = field(default_factory=list)
    """Time, name and attributes of each."""

    @property
    def sample_key(self) -> str | None:
        """The sample that it belongs to."""
        return text(self.attributes.get("rl.sample.key"), 400) or None


@dataclass(slots=True, kw_only=True)
class StepSpan:
    """One training step with what it consists of."""

    span: Span
    parts: list[Span] = field(default_factory=list)
    """Waits, computing and publishing, in order of their ends."""


class SpanStore:
    """The spans of one run."""

    def __init__(self, folder: Path, *, max_spans: int = MAX_SPANS) -> None:
        self._folder = folder
        self._max_spans = max_spans
        self._files: dict[Path, GrowingFile] = {}
        self._clear()

    def _clear(self) -> None:
        self.lanes: list[tuple[str, str]] = []
        self.texts: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._starts, self._ends = array("d"), array("d")
        self._columns = tuple(array("i") for _ in range(4))
        self.is_thinned = False
        self.steps: OrderedDict[str, StepSpan] = OrderedDict()
        """By the ids of their spans."""
        self._orphans: OrderedDict[str, list[Span]] = OrderedDict()
        self.samples: OrderedDict[str, list[Span]] = OrderedDict()
        """Spans of traced samples, by the samples' keys."""
        self._num_sample_spans = 0
        self.weights: deque[Span] = deque(maxlen=MAX_STEPS)
        """Publications and updates of weights, as they were read."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no traces."""
        return not self._starts and not self.samples

    @property
    def read_share(self) -> float:
        """How much of the files was taken in, 0 to 1."""
        total = sum(file.size for file in self._files.values())
        return sum(file.offset for file in self._files.values()) / total if total else 1.0

    def refresh(self, budget_s: float = BUDGET_S) -> None:
        """Take in what was written since, the newest files first, for about so long; the next call continues.

        Several processes append to the files, and the oldest of them are deleted while the run goes on.
        """
        until_s = time.monotonic() + budget_s
        paths = sorted(
            (path for path in self._folder.glob("traces*.jsonl") if _NAME.fullmatch(path.name)), reverse=True
        )
        # By name, traces.jsonl comes after those with numbers; it is the oldest.
        paths.sort(key=lambda path: path.name == "traces.jsonl")
        files = [
            self._files.setdefault(path, GrowingFile(path, max_line_bytes=MAX_LINE_BYTES)) for path in paths[:MAX_FILES]
        ]
        # All of them are looked at first, so that the share that was read is one of all.
        for file, has_changed in [(each, each.has_changed()) for each in files]:
            if has_changed and file.generation == 0:
                for _, line in file.lines():
                    for span in spans_of(line):
                        self._add(span)
                    if time.monotonic() > until_s:
                        return
            if file.generation:
                # Another run's files lie there now.
                self._files.clear()
                self._clear()
                return

    def columns(self) -> tuple[Any, Any, Any]:
        """Starts and ends, float64[n] in Unix seconds, and int32[4, n]: lane, kind, label and sample key by number."""
        return np.array(self._starts), np.array(self._ends), np.stack([np.array(each) for each in self._columns])

    def _add(self, span: Span) -> None:
        if span.name == STEP:
            self.steps[span.span_id] = StepSpan(span=span, parts=self._orphans.pop(span.span_id, []))
            _bound(self.steps, MAX_STEPS)
        if span.name.startswith(SAMPLE_PREFIXES) and span.sample_key:
            self._add_to_sample(span.sample_key, span)
        if (kind := KINDS.get(span.name)) is None:
            return
        if span.name in (PUBLISH, UPDATE):
            self.weights.append(span)
        if span.lane[0] == "trainer" and span.parent_id:
            self._add_part(span)
        if span.lane not in self.lanes:
            self.lanes.append(span.lane)
        self._starts.append(span.start_s)
        self._ends.append(span.end_s)
        words = (kind, _label(span), span.sample_key or "")
        numbers = (self.lanes.index(span.lane), *map(self._number, words))
        for column, number in zip(self._columns, numbers, strict=True):
            column.append(number)
        if len(self._starts) > self._max_spans:
            self._thin()

    def _add_to_sample(self, key: str, span: Span) -> None:
        found = self.samples.setdefault(key, [])
        if len(found) < MAX_SPANS_OF_SAMPLE:
            found.append(span)
            self._num_sample_spans += 1
        while len(self.samples) > MAX_SAMPLES or self._num_sample_spans > MAX_SPANS_OF_SAMPLES:
            self._num_sample_spans -= len(self.samples.popitem(last=False)[1])

    def _add_part(self, span: Span) -> None:
        """Keep a part with its step, which is written after it."""
        if (step := self.steps.get(span.parent_id)) is not None:
            step.parts.append(span)
        else:
            self._orphans.setdefault(span.parent_id, []).append(span)
            _bound(self._orphans, 1000)

    def _number(self, word: str) -> int:
        number = self._numbers.get(word)
        if number is None:
            if len(self.texts) >= _MAX_TEXTS:
                return 0
            number = self._numbers[word] = len(self.texts)
            self.texts.append(word)
        return number

    def _thin(self) -> None:
        starts, ends, columns = self.columns()
        lengths = ends - starts
        kept = np.sort(np.argsort(lengths, kind="stable")[len(lengths) // 2 :])
        self._starts, self._ends = array("d", starts[kept].tobytes()), array("d", ends[kept].tobytes())
        self._columns = tuple(array("i", column[kept].tobytes()) for column in columns)
        self.is_thinned = True


def spans_of(line: bytes) -> Iterator[Span]:
    """The spans of a line; what is malformed is left out."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return
    for group in _list(document, "resourceSpans"):
        resource = _attributes(mapping(group.get("resource")))
        lane = _lane(resource)
        for scope in _list(group, "scopeSpans"):
            for span in _list(scope, "spans"):
                if (found := _span(span, lane)) is not None:
                    yield found


def _span(span: Mapping[str, Any], lane: tuple[str, str]) -> Span | None:
    start_s, end_s = _seconds(span.get("startTimeUnixNano")), _seconds(span.get("endTimeUnixNano"))
    if start_s is None or end_s is None or end_s < start_s:
        return None
    events = [
        (at_s, text(each.get("name"), 100), _attributes(each))
        for each in _list(span, "events")[:1000]
        if (at_s := _seconds(each.get("timeUnixNano"))) is not None
    ]
    return Span(
        name=text(span.get("name"), 100),
        span_id=text(span.get("spanId"), 64),
        parent_id=text(span.get("parentSpanId"), 64),
        start_s=start_s,
        end_s=end_s,
        lane=lane,
        attributes=_attributes(span),
        events=events,
    )


def _label(span: Span) -> str:
    waits_for = text(span.attributes.get("rl.waits_for"), 200)
    if waits_for:
        return waits_for
    version = span.attributes.get("rl.policy.version")
    return f"version {version}" if isinstance(version, int) else span.sample_key or ""


def _lane(resource: Mapping[str, Any]) -> tuple[str, str]:
    service = text(resource.get("service.name"), 100)
    name = text(resource.get("service.instance.id"), 200) or service or "?"
    kind = next((each for each in _LANES if each in service or each in name), "broker")
    return kind, name


def _attributes(owner: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in _list(owner, "attributes")[:100]:
        for kind, value in mapping(each.get("value")).items():
            if kind == "intValue" and isinstance(value, str):
                # OTLP writes 64-bit numbers as text.
                value = int(value) if value.lstrip("-").isdigit() and len(value) < 20 else None
            if isinstance(value, (str, int, float, bool)):
                found[text(each.get("key"), 100)] = value
    return found


def _seconds(nanoseconds: object) -> float | None:
    try:
        value = int(nanoseconds) if isinstance(nanoseconds, (str, int)) else 0
    except ValueError:
        return None
    return value / 1e9 if 0 < value < 2**63 else None


def _list(owner: object, name: str) -> list[Mapping[str, Any]]:
    value = owner.get(name) if isinstance(owner, dict) else None
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _bound(kept: OrderedDict[str, Any], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
