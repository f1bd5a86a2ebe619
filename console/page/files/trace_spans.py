"""Reads a run's traces (OTLP JSON, a TracesData object a line) into spans, in bounded memory and as they grow."""

from __future__ import annotations

import re
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from console.page.files.growing_file import GrowingFile
from console.page.files.span import KINDS, SAMPLE_PREFIXES, STEP, Span, spans_of
from console.page.files.traced_weights import TracedWeights
from console.page.files.values import text

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_SPANS = 400_000
"""Activities of services that are held, some 35 bytes each; beyond it the shorter half of them is forgotten."""
MAX_SAMPLES, MAX_SPANS_OF_SAMPLE = 5000, 200
MAX_SPANS_OF_SAMPLES = 25_000
"""Spans of all samples together, some 1 kB each; beyond it the samples that ended first are forgotten."""
MAX_STEPS, MAX_ORPHANS = 20_000, 1000
MAX_FILES = 64
BUDGET_S = 1.0
_MAX_TEXTS = 200_000
_T = TypeVar("_T")
_NAME = re.compile(r"traces(-\d{5})?\.jsonl")


@dataclass(slots=True, kw_only=True)
class StepSpan:
    """One training step with what it consists of."""

    span: Span
    parts: list[Span] = field(default_factory=list)
    """Waits, computing and publishing, in no order."""


class SpanStore:
    """The spans of one run."""

    def __init__(self, folder: Path, *, max_spans: int = MAX_SPANS) -> None:
        self._folder = folder
        self._max_spans = max_spans
        self._files: dict[Path, GrowingFile] = {}
        self._clear()

    def _clear(self) -> None:
        self._lane_numbers: dict[tuple[str, str], int] = {}
        self.texts: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._starts, self._ends = array("d"), array("d")
        self._columns = tuple(array("i") for _ in range(4))
        self.is_thinned = False
        self.steps: dict[str, StepSpan] = {}
        """By the ids of their spans, in no order: newer files are read before older ones."""
        self._orphans: OrderedDict[str, list[Span]] = OrderedDict()
        self.samples: dict[str, list[Span]] = {}
        """Spans of traced samples, by the samples' keys."""
        self._num_sample_spans = 0
        self._forgotten_s = 0.0
        """End of the newest sample that was forgotten, Unix seconds; older ones are not taken in."""
        self.weights = TracedWeights()

    @property
    def lanes(self) -> list[tuple[str, str]]:
        """Kind and name of each service, by number."""
        return list(self._lane_numbers)

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
            if len(self.steps) > MAX_STEPS:
                _forget_oldest(self.steps, lambda step: step.span.end_s)
        if span.name.startswith(SAMPLE_PREFIXES) and span.sample_key:
            self._add_to_sample(span.sample_key, span)
        if (kind := KINDS.get(span.name)) is None:
            return
        self.weights.add(span)
        if span.lane[0] == "trainer" and span.parent_id:
            self._add_part(span)
        lane = self._lane_numbers.setdefault(span.lane, len(self._lane_numbers))
        self._starts.append(span.start_s)
        self._ends.append(span.end_s)
        words = (kind, _label(span), span.sample_key or "")
        numbers = (lane, *map(self._number, words))
        for column, number in zip(self._columns, numbers, strict=True):
            column.append(number)
        if len(self._starts) > self._max_spans:
            self._thin()

    def _add_to_sample(self, key: str, span: Span) -> None:
        found = self.samples.get(key)
        if found is None:
            if span.end_s <= self._forgotten_s:
                return
            found = self.samples[key] = []
        if len(found) < MAX_SPANS_OF_SAMPLE:
            found.append(span)
            self._num_sample_spans += 1
        while len(self.samples) > MAX_SAMPLES or self._num_sample_spans > MAX_SPANS_OF_SAMPLES:
            for spans in _forget_oldest(self.samples, _end_s):
                self._num_sample_spans -= len(spans)
                self._forgotten_s = max(self._forgotten_s, _end_s(spans))

    def _add_part(self, span: Span) -> None:
        """Keep a part with its step, which is written after it."""
        if (step := self.steps.get(span.parent_id)) is not None:
            step.parts.append(span)
        else:
            self._orphans.setdefault(span.parent_id, []).append(span)
            if len(self._orphans) > MAX_ORPHANS:
                self._orphans.popitem(last=False)

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


def _label(span: Span) -> str:
    waits_for = text(span.attributes.get("rl.waits_for"), 200)
    if waits_for:
        return waits_for
    version = span.attributes.get("rl.policy.version")
    return f"version {version}" if isinstance(version, int) else span.sample_key or ""


def _end_s(spans: list[Span]) -> float:
    return max(span.end_s for span in spans)


def _forget_oldest(kept: dict[str, _T], end_s: Callable[[_T], float]) -> list[_T]:
    """Take an eighth out, at least one: sorting is then paid once for many."""
    oldest = sorted(kept, key=lambda key: end_s(kept[key]))[: max(1, len(kept) // 8)]
    return [kept.pop(key) for key in oldest]
