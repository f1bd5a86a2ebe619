"""A notice of a file, a URL or a cloud is heeded once; nothing else is a notice."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from penstock.config import ConfigError
from penstock.notices import metadata_server, watch
from penstock.notices.watch import NoticeSources, heed

WAIT_S = 20.0
AZURE_NAME = {"/metadata/instance/compute/name": (200, "vm-1")}


def azure_events(*events):
    return {**AZURE_NAME, "/metadata/scheduledevents": (200, json.dumps({"Events": list(events)}))}


class _Metadata(BaseHTTPRequestHandler):
    answers: dict
    headers_needed: dict
    asked: threading.Semaphore

    def do_GET(self):
        path = urlsplit(self.path).path
        status, text = self.answers.get(path, (404, "none"))
        if not all(self.headers.get(name) == value for name, value in self.headers_needed.get(path, {}).items()):
            status, text = 401, ""
        if self.command != ("PUT" if path == "/latest/api/token" else "GET"):
            status, text = 405, ""
        self.send_response(status)
        self.send_header("Location", "/plain") if status == 302 else None
        self.end_headers()
        self.wfile.write(text.encode())
        self.asked.release()

    def do_PUT(self):
        self.do_GET()

    def log_message(self, *_):
        pass


@contextmanager
def metadata(monkeypatch):
    """A metadata server of every cloud; its handler class, and its address."""
    kind = type("Metadata", (_Metadata,), {"answers": {}, "headers_needed": HEADERS, "asked": threading.Semaphore(0)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(metadata_server, "LINK_LOCAL", url)
    monkeypatch.setattr(metadata_server, "GOOGLE", url)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    try:
        yield kind, url
    finally:
        server.shutdown()
        server.server_close()


CASES = {
    "plain": ("{url}/plain", {"/plain": (200, "")}, {"/plain": (302, "")}),
    "aws": (
        "aws",
        {"/latest/api/token": (200, "t0"), "/latest/meta-data/spot/instance-action": (200, '{"action": "terminate"}')},
        {"/latest/api/token": (200, "t0")},
    ),
    "gcp": (
        "gcp",
        {"/computeMetadata/v1/instance/preempted": (200, "TRUE\n")},
        {"/computeMetadata/v1/instance/preempted": (200, "FALSE\n")},
    ),
    "azure": (
        "azure",
        azure_events({"EventType": "Preempt", "Resources": ["vm-0", "vm-1"]}),
        azure_events({"EventType": "Preempt", "Resources": ["vm-0"]}, {"EventType": "Reboot", "Resources": ["vm-1"]}),
    ),
}
HEADERS = {
    "/latest/meta-data/spot/instance-action": {"X-aws-ec2-metadata-token": "t0"},
    "/computeMetadata/v1/instance/preempted": {"Metadata-Flavor": "Google"},
    "/metadata/scheduledevents": {"Metadata": "true"},
}


@pytest.mark.parametrize("cloud", CASES)
def test_a_cloud_that_announces_the_end_is_heeded_and_one_that_does_not_is_not(cloud, monkeypatch):
    url, leaving, staying = CASES[cloud]
    noticed = threading.Event()
    with metadata(monkeypatch) as (server, address):
        heed(NoticeSources(url=url.format(url=address)), on_notice=noticed.set)
        # Nothing is known, then this machine stays, then it is to leave.
        for answers in ({}, staying):
            server.answers = answers
            for _ in range(6):
                assert server.asked.acquire(timeout=WAIT_S)
            assert not noticed.is_set()
        server.answers = leaving
        assert noticed.wait(WAIT_S)


def test_a_file_is_a_notice_and_a_server_that_does_not_answer_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.01)
    noticed, path = threading.Event(), tmp_path / "notice"
    heed(NoticeSources(file=path, url="http://127.0.0.1:9/"), on_notice=noticed.set)
    assert not noticed.wait(0.2)
    path.touch()
    assert noticed.wait(WAIT_S)


def test_a_notice_that_could_never_come_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"--notice-file: .*there is no folder"):
        NoticeSources(file=tmp_path / "typo" / "notice")
    for url in ("169.254.169.254/", "file:///etc/passwd", "http://", "http://user@host/"):
        with pytest.raises(ConfigError, match=r"--notice-url: .*or one of aws, gcp, azure"):
            NoticeSources(url=url)
