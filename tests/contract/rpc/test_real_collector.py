"""A real collector (rotel, from PyPI) takes what the run folder has, by both protocols, and passes it on unchanged."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock import tracing
from penstock.process.log_setup import configure_logging
from penstock.tracing.recording import Event, Span
from penstock.tracing.settings import settings_from
from tests.helpers.otlp import collecting
from tests.helpers.ports import free_port
from tests.helpers.traces import written_spans
from tests.helpers.waiting import until

AGENT = os.environ.get("PENSTOCK_ROTEL") or shutil.which("rotel-agent")
GROUP = tracing.group_context("r", "g")

pytestmark = pytest.mark.skipif(
    AGENT is None, reason="no rotel-agent: pip download rotel, and name it in PENSTOCK_ROTEL"
)


@contextmanager
def relaying(to_port: int, folder: Path) -> Iterator[dict[str, int]]:
    """A collector that exports to another one: its port by protocol."""
    ports = {"grpc": free_port(), "http/protobuf": free_port()}
    command = [
        str(AGENT),
        "start",
        *("--otlp-grpc-endpoint", f"127.0.0.1:{ports['grpc']}"),
        *("--otlp-http-endpoint", f"127.0.0.1:{ports['http/protobuf']}"),
        *("--exporter", "otlp", "--otlp-exporter-endpoint", f"http://127.0.0.1:{to_port}"),
        *("--pid-file", str(folder / "rotel.pid"), "--log-file", str(folder / "rotel.log")),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        yield ports
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_real_collector_passes_on_what_the_folder_has(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as end, relaying(end.port, tmp_path) as ports:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{ports[protocol]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("PENSTOCK_TRACE_DIR", str(tmp_path))
        await until(lambda: _answers(ports[protocol]))
        configure_logging("test", log_format="json")
        tracing.configure("test", instance="test-0", settings=settings_from())
        try:
            chunk = Event(name="chunk", at_s=1.5, attributes={"rl.tokens": 7})
            attributes = {"text": "\u00fc\u2028", "whole": -3, "part": 0.25, "is": True}
            tracing.record(_span(0, context=GROUP, parent=tracing.step_context("r", 1, 0), attributes=attributes))
            tracing.record(_span(1, events=[chunk], links=[GROUP], error="it broke"))
            for number in range(1000):
                tracing.record(_span(number))
        finally:
            tracing.close()
        await until(lambda: len(end.spans()) == 1002)
        # Batches of a collector need not come in the order in which it got them.
        assert sorted(end.spans(), key=repr) == sorted(written_spans(tmp_path), key=repr)


def _span(number: int, **more: object) -> Span:
    return Span(name="rl.test", run_id="r", start_s=1.0 + number, end_s=2.0 + number, **more)  # type: ignore[arg-type]


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
