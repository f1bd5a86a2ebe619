"""Answers the page's questions about one run folder; holds what was read of it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from console.config.run_folder import CONSOLE_NAME, RunFolder, read_record
from console.launch.probes import masked
from console.page.files.gap_lines import GapLines
from console.page.files.indexed_recording import IndexedRecording, open_recording
from console.page.files.metrics_table import MetricsTable
from console.page.files.token_texts import TokenTexts
from console.page.files.trace_spans import SpanStore
from console.page.files.values import (
    Answer,
    BadQuestionError,
    count,
    mapping,
    number,
    one_of,
    read_json,
    seconds,
    text,
    whole,
)
from console.page.queries.cost import PURCHASES, cost
from console.page.queries.lanes import lanes
from console.page.queries.one_sample import one_sample
from console.page.queries.problems import problems
from console.page.queries.sample_lists import SampleLists
from console.page.queries.series import EVALUATIONS, MAX_POINTS, MAX_SERIES, MAX_VALUES, X_AXES, series
from console.page.queries.weights import weights
from penstock.v1 import broker_pb2

MAX_CONFIG_BYTES = 1024 * 1024
TRAJECTORIES, KEPT_SAMPLES = "trajectories", "samples.jsonl"
"""A whole recording, with either suffix; the few samples that a run keeps without one."""

LiveRun = Callable[[], broker_pb2.GetRunResponse | None]
"""The broker's state of a run, as it is known; None if it is not."""


class RunData:
    """One run. May be asked from several threads, one of which it answers at a time.

    Args:
        folder: Of the run.
        live: What the broker says of it.
    """

    def __init__(self, folder: RunFolder, *, live: LiveRun = lambda: None) -> None:
        self.folder = folder
        self._live = live
        self._lock = threading.Lock()
        self._steps = MetricsTable(folder.metrics)
        self._evaluations = MetricsTable(folder.path / "evaluations.jsonl", prefix=EVALUATIONS)
        self._spans = SpanStore(folder.path)
        self._gaps = GapLines(folder.path)
        self._recording: IndexedRecording | None = None
        self._lists: SampleLists | None = None
        self._config: tuple[int, str, Answer] = (0, "", {})
        self._questions: Mapping[str, Callable[[Mapping[str, str]], Answer]] = {
            "series": self._series,
            "metrics": lambda _query: {"names": self._names()},
            "samples": self._samples,
            "sample": self._sample,
            "lanes": lambda query: lanes(self._spans, self._steps, query),
            "problems": lambda _query: problems(self.folder, summary=self._summary(), run=self._live()),
            "cost": lambda _query: cost(self.folder, self._document(), self._summary(), self._plan(), self._steps),
            "weights": lambda _query: weights(self._spans, self._steps, self._live()),
        }

    def answer(self, what: str, query: Mapping[str, str]) -> Answer:
        """The answer to `/api/WHAT?query`. Raises BadQuestionError."""
        question = self._questions.get(what)
        if question is None:
            raise BadQuestionError(f"/api/{what:.40}: there is no such question")
        with self._lock:
            self._steps.refresh()
            self._evaluations.refresh()
            return question(query)

    def facts(self) -> Answer:
        """What `/api/runs` says of the run."""
        with self._lock:
            self._steps.refresh()
            return self._facts()

    def _facts(self) -> Answer:
        summary, config = self._summary(), self._document()
        times = [time for time in self._steps.times.tolist() if math.isfinite(time)]
        versions, run = self._steps.versions, self._live()
        outcome = text(summary.get("outcome"), 64) or None
        return {
            "run_id": text(mapping(config.get("run")).get("id"), 200) or self.folder.path.name,
            "state": self._state(outcome, run),
            "outcome": outcome,
            "message": text(summary.get("message"), 2000),
            "steps": int(versions[-1]) if len(versions) else 0 if run is None else run.policy_version,
            "num_steps": count(mapping(config.get("run")).get("num_steps")),
            "started_s": self._started_s(times),
            "updated_s": times[-1] if times else None,
            "config": self._config[1],
        }

    def _state(self, outcome: str | None, run: broker_pb2.GetRunResponse | None) -> str:
        """`running` while its console lives, or its broker says that it is open; `cut short` without an end."""
        console = read_record(self.folder.services / f"{CONSOLE_NAME}.json")
        if (console is not None and console.is_alive and console.state != "stopped") or (
            run is not None and not run.is_closed
        ):
            return "running"
        if outcome is None and run is not None:
            return "finished"
        return {None: "cut short", "failed": "failed"}.get(outcome, "finished")

    def _started_s(self, times: Sequence[float]) -> float | None:
        """When its configuration was written; no later than its first step, as in a folder that was copied."""
        try:
            return min([self.folder.config.stat().st_mtime, *times[:1]])
        except OSError:
            return None

    def _series(self, query: Mapping[str, str]) -> Answer:
        names = [name for name in query.get("names", "").split(",") if name]
        if len(names) > MAX_SERIES:
            raise BadQuestionError(f"names: {len(names)} metrics; at most {MAX_SERIES} at once")
        names = names or self._names()
        low, high = seconds(query, "from"), seconds(query, "to")
        points = whole(query, "points", 600, least=1, most=MAX_POINTS)
        return series(
            self._steps,
            self._evaluations,
            names,
            x=one_of(query, "x", X_AXES),
            points=min(points, max(10, MAX_VALUES // max(1, len(names)))),
            within=(-math.inf if low is None else low, math.inf if high is None else high),
        )

    def _names(self) -> list[str]:
        return [*self._steps.names, *self._evaluations.names]

    def _samples(self, query: Mapping[str, str]) -> Answer:
        recording = self._recorded()
        if self._lists is None:
            self._lists = SampleLists(recording)
        return self._lists.answer(query)

    def _sample(self, query: Mapping[str, str]) -> Answer:
        folders = sorted(self.folder.checkpoints.glob("step_*"), key=lambda path: (len(path.name), path.name))[::-1]
        model = mapping(self._document().get("model")).get("path")
        if isinstance(model, str) and "://" not in model:
            folders.append(Path(model))
        return one_sample(
            self._recorded(),
            query,
            texts=TokenTexts(folders),
            gaps=self._gaps,
            time_of_step=self._steps.time_of,
        )

    def _recorded(self) -> IndexedRecording:
        """The run's recording if there is one, else the samples that it keeps; looked for again while there is none."""
        path = self._recording_path()
        if self._recording is None or self._recording.path != path:
            self._recording, self._lists = open_recording(path), None
        return self._recording

    def _recording_path(self) -> Path:
        stated = self._document().get("record")
        named = [Path(stated)] if isinstance(stated, str) and Path(stated).suffix in (".jsonl", ".parquet") else []
        own = [self.folder.path / f"{TRAJECTORIES}{suffix}" for suffix in (".jsonl", ".parquet")]
        kept = self.folder.path / KEPT_SAMPLES
        return next((path for path in (*named, *own) if path.is_file()), kept)

    def _summary(self) -> Answer:
        return read_json(self.folder.summary)

    def _document(self) -> Answer:
        """The configuration, as far as it can be read."""
        try:
            changed_ns = self.folder.config.stat().st_mtime_ns
            if changed_ns != self._config[0]:
                with self.folder.config.open(encoding="utf-8", errors="replace") as file:
                    said = file.read(MAX_CONFIG_BYTES)
                self._config = (changed_ns, masked(said), _document_of(said))
        except OSError:
            self._config = (0, "", {})
        return self._config[2]

    def _plan(self) -> Answer:
        """The plan followed last, with what the newest plan that says so expects of one more machine."""
        try:
            with self.folder.plans.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 4 * 1024 * 1024))
                lines = file.read(4 * 1024 * 1024).splitlines()
        except OSError:
            return {}
        plans = [plan for line in lines[-20:] if (plan := _plan_of(line))]
        newest: Answer = plans[-1] if plans else {}
        advised: list[Any] = next((each[PURCHASES] for each in reversed(plans) if each.get(PURCHASES)), [])
        return newest and newest | {PURCHASES: advised}


def _plan_of(line: bytes) -> Answer:
    try:
        plan: Any = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(plan, dict):
        return {}
    return plan | {"expected_tokens_per_second": number(plan.get("expected_tokens_per_second"))}


def _document_of(said: str) -> Answer:
    try:
        found = yaml.load(said, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
