"""Implements `penstock logs --sample`: one sample's way through the services, from a run folder's spans and logs.

Spans of the group's trace that concern the sample, spans of others that link to it (the batch that scored it, the
scorer's pack, the step that trained on it) with the critic's part of that step, and the lines of every log that name it
or belong to one of those traces; in order of time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from console.config.run_folder import RunFolder, open_folder
from penstock.config import ConfigError
from penstock.tracing import TraceContext, group_context, sample_context
from penstock.tracing.trace_file import trace_files

MAX_ATTEMPTS = 256
"""Attempts at a sample whose spans are recognised."""
_TIME = re.compile(r'(?:^|"timestamp": ")(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?)Z')
_CONTROL = {code: "." for code in (*range(32), 127, *range(128, 160))}
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """Something that happened."""

    at_s: float
    """Unix time, by the clock of where it happened."""
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class SampleKey:
    """A sample and the spans that are its own."""

    group_id: str
    index: int
    trace_id: str
    root_span_id: str
    span_ids: frozenset[str]

    @classmethod
    def read(cls, text: str, *, run_id: str) -> SampleKey:
        """From `group/index`. Raises ConfigError."""
        group_id, _, index = text.rpartition("/")
        if not group_id or not index.isdecimal() or len(index) > 9:
            raise ConfigError(f"--sample {text!r}: write the group's id and the sample's index, as in train-12/3")
        root = group_context(run_id, group_id)
        own = (sample_context(root, int(index), attempt) for attempt in range(MAX_ATTEMPTS))
        return cls(group_id, int(index), _hex(root)[0], _hex(root)[1], frozenset(_hex(each)[1] for each in own))


def sample_log_command(run_dir: Path, key_text: str) -> int:
    """Print what happened to a sample; returns 1 if nothing is known of it. Raises ConfigError."""
    folder = open_folder(run_dir)
    key = SampleKey.read(key_text, run_id=_run_id(folder))
    spans = list(_spans(folder.path, key))
    spans += _parts(folder.path, [span for _, span in spans if span["name"] == "rl.train.step"])
    traces = {key.trace_id} | {span["traceId"] for _, span in spans}
    entries = sorted([*_span_entries(spans), *_lines(folder, key, traces)])
    for entry in entries:
        stamp = datetime.fromtimestamp(entry.at_s, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        print(f"{stamp}Z {entry.where:<12} {entry.what}")
    if not spans:
        print(
            f"{key_text}: no span in {folder.path}; {_ratio(folder)} of the groups are traced (tracing.ratio), and "
            "those that failed or were slow, once they have ended"
        )
    return 0 if entries else 1


def _spans(folder: Path, key: SampleKey) -> Iterator[tuple[str, Json]]:
    """The sample's spans and those that link to it, each with the service that wrote it."""
    found = list(_naming(folder, {key.trace_id}))
    own = set(key.span_ids)
    # Parents may stand after their children, by any number of levels.
    while more := {span["spanId"] for _, span in found if span.get("parentSpanId") in own} - own:
        own |= more
    for where, span in found:
        is_own = span["traceId"] == key.trace_id and span["spanId"] in own | {key.root_span_id}
        if is_own or any(link.get("spanId") in key.span_ids for link in span.get("links", ())):
            yield where, span


def _parts(folder: Path, steps: Sequence[Json]) -> Iterator[tuple[str, Json]]:
    """What the critic did for these steps; the trainer's own waits and passes are those of all samples."""
    if steps:
        names = {step["spanId"] for step in steps}
        for where, span in _naming(folder, {step["traceId"] for step in steps}):
            if span.get("parentSpanId") in names and span["name"].startswith("rl.critic."):
                yield where, span


def _naming(folder: Path, trace_ids: Collection[str]) -> Iterator[tuple[str, Json]]:
    """The spans of all lines that name one of these traces."""
    for path in trace_files(folder):
        # One that is deleted meanwhile was the oldest.
        with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                if any(each in line for each in trace_ids):
                    yield from _read(line)


def _read(line: str) -> Iterator[tuple[str, Json]]:
    """The spans of a line; none of one that a crash or a full disk cut."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        for resource in json.loads(line)["resourceSpans"]:
            names = _attributes(resource["resource"]["attributes"])
            where = str(names.get("service.instance.id", "?"))
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    _ = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"]), span["traceId"], span["spanId"]
                    yield where, span


def _span_entries(spans: Iterable[tuple[str, Json]]) -> Iterator[Entry]:
    for where, span in spans:
        start_s, end_s = int(span["startTimeUnixNano"]) / 1e9, int(span["endTimeUnixNano"]) / 1e9
        words = [span["name"], f"{end_s - start_s:.3f} s", *_pairs(span)]
        if message := span.get("status", {}).get("message"):
            words.append(f"failed: {message}")
        yield Entry(start_s, where, _plain(" ".join(words)))
        for event in span.get("events", ()):
            what = " ".join([f"{span['name']}: {event['name']}", *_pairs(event)])
            yield Entry(int(event["timeUnixNano"]) / 1e9, where, _plain(what))


def _pairs(owner: Json) -> list[str]:
    return [f"{name.removeprefix('rl.')}={value}" for name, value in _attributes(owner.get("attributes", ())).items()]


def _lines(folder: RunFolder, key: SampleKey, traces: Iterable[str]) -> Iterator[Entry]:
    """The lines of all logs that concern the sample, older files included."""
    traces = tuple(traces)
    for path in sorted(folder.logs.glob("*.log*")):
        with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if any(trace in line for trace in traces) or _names(line, key):
                    at = _TIME.search(line)
                    at_s = datetime.fromisoformat(f"{at[1]}+00:00").timestamp() if at else 0.0
                    yield Entry(at_s, path.name.partition(".log")[0], _plain(line.rstrip("\n")))


def _names(line: str, key: SampleKey) -> bool:
    """Whether a line, of text or JSON, is about the sample, or about its group as a whole."""
    if key.group_id not in line:
        return False
    if line.startswith("{"):
        with suppress(ValueError):
            fields = json.loads(line)
            return bool(fields.get("group_id") == key.group_id and fields.get("sample_index", key.index) == key.index)
    group = re.search(rf"\bgroup_id=['\"]?{re.escape(key.group_id)}['\"]?(?=\s|$)", line)
    index = re.search(r"\bsample_index=(\d+)", line)
    return group is not None and (index is None or int(index[1]) == key.index)


def _attributes(pairs: Iterable[Json]) -> dict[str, Any]:
    return {pair["key"]: next(iter(pair["value"].values()), "") for pair in pairs}


def _hex(context: TraceContext) -> tuple[str, str]:
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def _plain(text: str) -> str:
    """Without what would move a terminal's cursor."""
    return text.translate(_CONTROL)


def _document(folder: RunFolder) -> dict[str, Any]:
    try:
        found = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder.config}: cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _run_id(folder: RunFolder) -> str:
    return str((_document(folder).get("run") or {}).get("id") or folder.path.name)


def _ratio(folder: RunFolder) -> str:
    section = _document(folder).get("tracing") or {}
    return f"{100 * float(section.get('ratio', 0.0)):g} %" if section.get("enabled", True) else "none"
