"""A collector of traces gets what the run folder has, and whatever it does costs the process nothing but spans."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from penstock import tracing
from penstock.config import ConfigError
from penstock.process.log_setup import configure_logging
from penstock.tracing import recorder, span_queue
from penstock.tracing.counters import LOST
from penstock.tracing.export import collector as collector_module
from penstock.tracing.recording import Event, Span
from penstock.tracing.settings import collector_problem, settings_from
from tests.helpers.certificates import issue, make_authority
from tests.helpers.otlp import Response, collecting, collecting_by_http
from tests.helpers.ports import free_port
from tests.helpers.traces import written_spans
from tests.helpers.waiting import until

GROUP = tracing.group_context("r", "g")


def span(number: int = 0, **more: Any) -> Span:
    return Span(name="rl.test", run_id="r", start_s=1.0 + number, end_s=2.0 + number, **more)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "EXPORT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(span_queue, "CLOSE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(recorder, "EXPORT_DELAY_MS", 20.0)


@pytest.fixture
def exporting(monkeypatch: pytest.MonkeyPatch):
    """Records for the collector at an endpoint, and with a folder."""

    def begin(endpoint: str, folder: Path | None = None, **variables: str) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        for name, value in variables.items():
            monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
        if folder is not None:
            monkeypatch.setenv("PENSTOCK_TRACE_DIR", str(folder))
        configure_logging("test", log_format="json")
        tracing.configure("test", instance="test-0", settings=settings_from())

    yield begin
    tracing.close()


def lost(at: str = "collector") -> float:
    return LOST.labels(at)._value.get()


def said(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("protocol", "serving"), [("grpc", collecting), ("http/protobuf", collecting_by_http)])
async def test_it_gets_what_the_folder_has_by_tls_with_its_key(protocol, serving, tmp_path, exporting):
    certificate = tmp_path / "certificate"
    issue(make_authority(tmp_path / "authority"), out=certificate)
    with serving(certificate=certificate) as collector:
        exporting(
            f"https://localhost:{collector.port}",
            tmp_path,
            PROTOCOL=protocol,
            CERTIFICATE=str(certificate / "ca.pem"),
            HEADERS="authorization=Bearer%20sesame",
        )
        assert collector_problem() == ""
        events = [Event(name="chunk", at_s=1.5, attributes={"rl.tokens": 7})]
        attributes = {"text": "\u00fc\u2028", "whole": -3, "part": 0.25, "is": True}
        tracing.record(span(context=GROUP, parent=tracing.step_context("r", 1, 0), attributes=attributes))
        tracing.record(span(1, events=events, links=[GROUP], error="it broke"))
        for number in range(1000):
            tracing.record(span(number))
        tracing.close()
    assert len(collector.spans()) == 1002
    assert collector.spans() == written_spans(tmp_path)
    assert {each["authorization"] for each in collector.metadata} == {"Bearer sesame"}


async def test_one_that_is_away_is_said_once_and_its_spans_are_counted(exporting, capfd):
    port, before = free_port(), lost()
    exporting(f"http://127.0.0.1:{port}")
    for number in range(3):
        tracing.record(span(number))
        await until(lambda number=number: lost() == before + number + 1)
    lines = said(capfd)
    assert [each["event"] for each in lines] == ["the collector does not take spans; the run goes on without them"]
    assert lines[0]["error"].startswith("UNAVAILABLE: ")
    assert collector_problem().startswith("takes no spans: UNAVAILABLE: ")


async def test_one_that_never_answers_slows_nothing_and_a_process_ends_in_time(tmp_path, exporting):
    with collecting(lambda request, context: time.sleep(3) or Response()) as collector:
        exporting(f"http://{collector.target}", tmp_path)
        before, begun_s = (lost(), lost("queue")), time.monotonic()
        for number in range(3 * span_queue.MAX_QUEUED_SPANS):
            tracing.record(span(number))
        await until(lambda: bool(collector.metadata))
        closing_s = time.monotonic()
        tracing.close()
        assert time.monotonic() - closing_s < 5 * span_queue.CLOSE_TIMEOUT_S
    num_lost = lost() - before[0] + lost("queue") - before[1]
    # Each span was taken, or is counted: by the file's queue as well as the collector's.
    assert (
        num_lost + len(written_spans(tmp_path))
        >= 2 * 3 * span_queue.MAX_QUEUED_SPANS - 8 * span_queue.MAX_SPANS_PER_LINE
    )
    assert closing_s - begun_s < 60


async def test_what_a_hostile_one_answers_is_counted_and_never_more_than_was_sent(exporting, capfd):
    def answer(request, context):
        number = int(request.resource_spans[0].scope_spans[0].spans[0].start_time_unix_nano / 1e9) - 1
        if number == 0:
            # Wait for a year, it says.
            context.set_trailing_metadata((("google.rpc.retryinfo-bin", b"\x0a\x05\x08\x80\xe7\x84\x0f"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "sesame\r\n" * 100)
        rejected = trace_service_pb2.ExportTracePartialSuccess
        if number == 1:
            return Response(partial_success=rejected(rejected_spans=10**12, error_message="no \x1b[2J" * 10_000))
        if number == 2:
            return Response(partial_success=rejected(rejected_spans=-5))
        return Response(partial_success=rejected(error_message="x" * (5 * 2**20)))

    with collecting(answer) as collector:
        exporting(f"http://{collector.target}")
        before = lost()
        for number, (num_lost, num_calls) in enumerate(((1, 1), (2, 2), (2, 3), (3, 4))):
            tracing.record(span(number))
            await until(lambda num=num_calls: len(collector.metadata) >= num)
            await until(lambda num=num_lost: lost() == before + num)
        tracing.close()
    lines = said(capfd)
    words = ["does not take spans; the run goes on without them", "takes spans again"]
    expected = [words[0], words[1], words[0]]
    assert [each["event"].removeprefix("the collector ") for each in lines] == expected
    assert all(len(each.get("error", "")) <= 200 for each in lines)


async def test_over_http_what_a_hostile_one_answers_is_counted_and_never_more_than_was_sent(exporting, capfd):
    def endless():
        while True:
            yield b"x" * 4096

    def slow():
        while True:
            time.sleep(0.1)
            yield b"\x0a"

    rejected = Response(partial_success=trace_service_pb2.ExportTracePartialSuccess(rejected_spans=10**12))
    answers = [
        (400, b"\x1b[2J"),
        (307, b""),
        (200, b"no message"),
        (200, endless()),
        (200, slow()),
        (200, rejected.SerializeToString()),
        (200, b""),
    ]

    def answer(request):
        number = int(request.resource_spans[0].scope_spans[0].spans[0].start_time_unix_nano / 1e9) - 1
        return answers[number]

    with collecting_by_http(answer) as collector:
        exporting(f"http://{collector.target}/", PROTOCOL="http/protobuf")
        before = lost()
        for number in range(len(answers) - 1):
            tracing.record(span(number))
            await until(lambda num=number: lost() == before + num + 1)
        tracing.record(span(len(answers) - 1))
        lines = said(capfd)
        while len(lines) < 2:
            await asyncio.sleep(0.02)
            lines += said(capfd)
        tracing.close()
    assert lost() == before + len(answers) - 1
    words = ["does not take spans; the run goes on without them", "takes spans again"]
    assert [each["event"].removeprefix("the collector ") for each in lines] == words
    assert lines[0]["error"] == "HTTP 400 sesame"
    exporting(f"http://127.0.0.1:{free_port()}")
    assert "ConnectionError" in collector_problem()
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json': write one of grpc, http/protobuf"):
        exporting("http://127.0.0.1:1", PROTOCOL="http/json")


async def test_a_wrong_certificate_gets_no_spans_and_no_key(tmp_path, exporting, monkeypatch):
    certificate, other = tmp_path / "certificate", tmp_path / "other certificate"
    for each in (certificate, other):
        issue(make_authority(tmp_path / f"authority of {each.name}"), out=each)
    before = lost()
    with collecting(certificate=certificate) as collector:
        exporting(
            f"https://localhost:{collector.port}",
            CERTIFICATE=str(other / "ca.pem"),
            HEADERS="authorization=Bearer%20sesame",
        )
        assert "UNAVAILABLE" in collector_problem()
        tracing.record(span())
        await until(lambda: lost() == before + 1)
        assert collector.metadata == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/not there")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_CERTIFICATE: /not there: is no file; name the one with"):
        settings_from()
    assert "is no file" in collector_problem()
