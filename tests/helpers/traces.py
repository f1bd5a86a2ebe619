"""Records spans into a folder, and reads them back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import tracing
from penstock.tracing.settings import TraceSettings
from penstock.tracing.trace_file import trace_files


@dataclass(frozen=True, slots=True)
class Read:
    """A span as a trace file has it."""

    service: str
    span: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span["name"]

    @property
    def attributes(self) -> dict[str, Any]:
        return {each["key"]: next(iter(each["value"].values())) for each in self.span.get("attributes", ())}

    @property
    def links(self) -> list[str]:
        return [each["spanId"] for each in self.span.get("links", ())]


@contextmanager
def tracing_to(folder: Path, *, ratio: float) -> Iterator[None]:
    """Inside, this process records; afterwards all of it is in the folder."""
    tracing.configure("test", instance="test-0", settings=TraceSettings(folder=folder, ratio=ratio))
    try:
        yield
    finally:
        tracing.close()


def spans_in(folder: Path) -> list[Read]:
    """All spans of a folder, as they were written."""
    found = []
    for path in trace_files(folder):
        for line in path.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                names = {each["key"]: each["value"].get("stringValue") for each in resource["resource"]["attributes"]}
                spans = [span for scope in resource["scopeSpans"] for span in scope["spans"]]
                found += [Read(names["service.name"], span) for span in spans]
    return found
