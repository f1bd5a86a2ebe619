"""Which groups are sampled, what a peer's header means, and what bounds the trace files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from penstock import tracing
from penstock.config import ConfigError
from penstock.tracing.context import context_in
from penstock.tracing.counters import LOST
from penstock.tracing.measuring import measuring
from penstock.tracing.recorder import MAX_EVENTS, MAX_LINKS, MAX_TEXT_CHARACTERS
from penstock.tracing.recording import Event, Span
from penstock.tracing.settings import settings_from
from penstock.tracing.trace_file import TraceFile, trace_files
from tests.helpers.full_disk import largest_file
from tests.helpers.traces import spans_in, tracing_to

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def span(**changes) -> Span:
    return Span(**{"name": "rl.test", "run_id": "r", "start_s": 1.0, "end_s": 2.5, **changes})


def lost(at: str) -> float:
    return LOST.labels(at)._value.get()


def test_a_share_of_the_groups_is_sampled_and_every_process_agrees_on_which():
    chosen = [tracing.traceparent_of("r", f"g{n}", 0.01) for n in range(20_000)]
    assert 140 <= sum(map(bool, chosen)) <= 260
    assert chosen == [tracing.traceparent_of("r", f"g{n}", 0.01) for n in range(20_000)]
    # A larger share keeps those of the smaller one, with the ids of their groups' spans.
    more = [tracing.traceparent_of("r", f"g{n}", 0.05) for n in range(20_000)]
    assert all(large == small for small, large in zip(chosen, more, strict=True) if small)
    assert tracing.read_traceparent(tracing.traceparent_of("r", "g", 1.0)) == tracing.group_context("r", "g")
    assert not any(tracing.traceparent_of("r", f"g{n}", 0.0) for n in range(100))


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-01" + "x" * 10_000_000,
    ],
)
def test_what_is_no_traceparent_counts_as_none(header):
    assert tracing.read_traceparent(header) is None
    assert context_in({"TraceParent": header}) is None
    assert tracing.read_traceparent(f"00-{TRACE}-{SPAN}-01").traceparent == f"00-{TRACE}-{SPAN}-01"


def test_nothing_is_recorded_or_sent_where_tracing_is_off():
    with measuring("rl.test", {}) as measured:
        assert tracing.metadata() is None
        measured.attributes["rl.n"] = 1
    tracing.record(span())
    assert not tracing.is_on()


def test_settings_come_by_opentelemetrys_names(tmp_path):
    given = {"PENSTOCK_TRACE_DIR": str(tmp_path), "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    assert (settings_from(given).folder, settings_from(given).ratio) == (tmp_path, 0.5)
    assert not settings_from({**given, "OTEL_SDK_DISABLED": "true"}).is_on
    assert settings_from({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}).exports
    assert not settings_from({}).is_on
    for wrong in ("2", "-0.1", "nan", "many"):
        with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER_ARG"):
            settings_from({**given, "OTEL_TRACES_SAMPLER_ARG": wrong})
    with pytest.raises(ConfigError, match="write one of grpc, http/protobuf"):
        settings_from({"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_a_line_is_otlp_with_parents_links_and_bounded_texts(tmp_path):
    group = tracing.group_context("r", "g")
    events = [Event(name="chunk", at_s=1.5, attributes={"rl.tokens": 3})] * (MAX_EVENTS + 10)
    with tracing_to(tmp_path, ratio=0.0), tracing.within(group):
        tracing.record(span(context=group, attributes={"t": "x" * 5000, "f": 0.5, "b": True}, error="e" * 5000))
        tracing.record(span(events=events, links=[group] * (MAX_LINKS + 10), end_s=0.0))
        with pytest.raises(ZeroDivisionError):
            fail_inside(group)
    first, second, work = spans_in(tmp_path)
    assert (first.span["traceId"], first.span["spanId"]) == (f"{group.trace_id:032x}", f"{group.span_id:016x}")
    assert (first.span["startTimeUnixNano"], first.span["endTimeUnixNano"]) == ("1000000000", "2500000000")
    assert first.attributes == {"t": "x" * MAX_TEXT_CHARACTERS, "f": 0.5, "b": True}
    assert first.span["status"] == {"code": 2, "message": "e" * MAX_TEXT_CHARACTERS}
    assert (len(second.span["events"]), len(second.links)) == (MAX_EVENTS, MAX_LINKS)
    # No span ends before it begins.
    assert second.span["endTimeUnixNano"] == second.span["startTimeUnixNano"]
    assert (work.span["parentSpanId"], work.links) == (f"{group.span_id:016x}", [f"{group.span_id:016x}"])
    assert work.span["status"]["message"] == "ZeroDivisionError"


def fail_inside(group) -> None:
    with measuring("rl.work", {"rl.n": 2}) as measured:
        measured.links.append(group)
        assert tracing.current() != group
        _ = 1 / 0


def test_files_are_bounded_in_size_and_number_for_any_writer(tmp_path):
    with tracing_to(tmp_path, ratio=0.0):
        tracing.record(span())
    made = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    assert len(made) == 1
    writers = [TraceFile(tmp_path, max_bytes=2000, num_files=3) for _ in range(2)]
    for n in range(60):
        writers[n % 2].write([])
        with (trace_files(tmp_path)[-1]).open("a") as file:
            file.write(json.dumps({"resourceSpans": [], "filling": "x" * 300}) + "\n")
    names = [path.name for path in trace_files(tmp_path)]
    assert len(names) == 3
    assert names == sorted(names)
    assert names[0] != "traces.jsonl"
    assert all(path.stat().st_size < 2000 + 2 * 400 for path in trace_files(tmp_path))
    # A process that starts goes on with the newest.
    TraceFile(tmp_path, max_bytes=2000, num_files=3).write([])
    assert len(trace_files(tmp_path)) <= 3


def test_a_full_disk_costs_spans_and_nothing_else(tmp_path):
    before = lost("file")
    with tracing_to(tmp_path, ratio=0.0):
        tracing.record(span())
        wait(lambda: (tmp_path / "traces.jsonl").exists() and (tmp_path / "traces.jsonl").stat().st_size > 0)
        size = (tmp_path / "traces.jsonl").stat().st_size
        with largest_file(size + 100):
            tracing.record(span(name="rl.refused"))
            wait(lambda: lost("file") == before + 1)
        tracing.record(span(name="rl.later"))
    first, cut, last = (tmp_path / "traces.jsonl").read_text().splitlines()
    assert "rl.later" in json.dumps(json.loads(last))
    assert json.loads(first)
    assert len(cut) == 100


def wait(condition) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_folder_that_is_not_there_is_counted_too(tmp_path):
    before = lost("file")
    with tracing_to(Path(tmp_path / "gone"), ratio=0.0):
        tracing.record(span())
    assert lost("file") == before + 1
    assert trace_files(tmp_path / "gone") == []
