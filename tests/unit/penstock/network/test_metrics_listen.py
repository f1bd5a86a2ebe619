"""Prometheus metrics are offered where the configuration says, in every service."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from console.serve.serve import ServiceKind, _config_model
from penstock.config import ConfigError, MeasuredConfig, validate
from penstock.network.metrics_server import serve_metrics
from penstock.security import NO_SECURITY, Security
from tests.helpers.ports import free_port


@pytest.mark.parametrize("kind", ServiceKind)
def test_every_service_says_where_its_metrics_are(kind: ServiceKind) -> None:
    assert issubclass(_config_model(kind), MeasuredConfig)


def test_metrics_can_be_reached_at_any_address_of_the_machine() -> None:
    port = free_port()
    serve_metrics(MeasuredConfig(metrics_listen=f"0.0.0.0:{port}").metrics_address, Security(allows_plain=True))
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=10) as answer:
        assert b"# TYPE" in answer.read()


def test_metrics_leave_the_machine_in_plain_text_where_that_is_asked_for_only() -> None:
    with pytest.raises(ConfigError, match=r"^metrics_listen: 0.0.0.0:9100 is reached from other machines.*insecure"):
        serve_metrics("0.0.0.0:9100", NO_SECURITY)


def test_a_port_alone_stays_on_loopback() -> None:
    port = free_port()
    serve_metrics(MeasuredConfig(metrics_port=port).metrics_address, NO_SECURITY)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=10)


def test_an_address_that_is_taken_is_reported_in_one_line() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"^metrics_listen: cannot listen on {address}: .*in use"):
            serve_metrics(address, NO_SECURITY)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"metrics_listen": "9100"}, "metrics_listen"),
        ({"metrics_listen": "0.0.0.0:99999"}, "needs a port of 1 to 65535"),
        ({"metrics_listen": "0.0.0.0:9100", "metrics_port": 9100}, "leave one of them out"),
    ],
)
def test_what_is_no_address_is_refused(document: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate(MeasuredConfig, document, source="broker.yaml")
