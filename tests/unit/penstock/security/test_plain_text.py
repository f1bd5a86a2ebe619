"""TLS as a whole, or none: halves are refused, and plain text beyond loopback unless the configuration asks for it."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import structlog

from penstock.config import ConfigError
from penstock.network.rpc import Server, open_channel
from penstock.security import NO_SECURITY, Security
from penstock.security.plain_text import is_local
from penstock.transfer.content_server import serving_contents
from tests.helpers.certificates import make_security

TLS = ("PENSTOCK_TLS_CA", "PENSTOCK_TLS_CERT", "PENSTOCK_TLS_KEY")
WHOLE = ({"CA"}, {"CA", "CERT", "KEY"}, {"CA", "TOKEN"}, {"CA", "CERT", "KEY", "TOKEN"}, set())
"""Nothing, a client's part, or all of it; a token only beside an authority."""


def of_environment(monkeypatch: pytest.MonkeyPatch, parts: set[str], *, insecure: bool = False) -> Security:
    with tempfile.TemporaryDirectory() as folder:
        for name, path in zip(TLS, make_security(Path(folder)).tls_files.paths, strict=True):
            monkeypatch.setenv(name, str(path) if name.removeprefix("PENSTOCK_TLS_") in parts else "")
        monkeypatch.setenv("PENSTOCK_TOKEN", "secret" if "TOKEN" in parts else "")
        return Security.from_environment(insecure=insecure)


@pytest.mark.parametrize(
    "parts",
    [set(found) for size in range(5) for found in itertools.combinations(("CA", "CERT", "KEY", "TOKEN"), size)],
    ids=lambda parts: "+".join(sorted(parts)),
)
def test_half_a_configuration_is_refused_naming_what_is_missing(monkeypatch, parts):
    if parts in WHOLE:
        assert of_environment(monkeypatch, parts).has_credentials == bool(parts)
        return
    with pytest.raises(ConfigError) as caught:
        of_environment(monkeypatch, parts)
    lines = str(caught.value).splitlines()
    missing = {"CERT", "KEY"} - parts if parts & {"CERT", "KEY"} else set()
    missing |= {"CA"} - parts
    assert {line.split(":")[0] for line in lines} == {f"PENSTOCK_TLS_{name}" for name in missing}
    assert all("missing beside PENSTOCK_" in line and "name the file" in line for line in lines)
    assert "secret" not in str(caught.value)


def test_a_token_alone_goes_over_plain_sockets_where_that_is_asked_for(monkeypatch):
    with pytest.raises(ConfigError, match=r"insecure: true in the configuration \(PENSTOCK_INSECURE=true"):
        of_environment(monkeypatch, {"TOKEN"})
    assert of_environment(monkeypatch, {"TOKEN"}, insecure=True).allows_plain
    monkeypatch.setenv("PENSTOCK_INSECURE", "true")
    assert of_environment(monkeypatch, {"TOKEN"}).allows_plain
    # A certificate without its key is a mistake all the same.
    with pytest.raises(ConfigError, match="PENSTOCK_TLS_KEY"):
        of_environment(monkeypatch, {"CA", "CERT"})
    monkeypatch.setenv("PENSTOCK_INSECURE", "perhaps")
    with pytest.raises(ConfigError, match="PENSTOCK_INSECURE: 'perhaps' must be true or false"):
        of_environment(monkeypatch, set())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/run/x.sock", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        (":1", False),
        ("10.0.0.1:1", False),
        ("127.0.0.1.example:1", False),
        ("localhost.example:1", False),
        ("trainer:1", False),
    ],
)
def test_loopback_alone_is_local(address, expected):
    assert is_local(address) is expected


async def start_server(listen: str, security: Security) -> None:
    server = Server(listen=listen, services=[], security=security)
    try:
        await server.start()
    finally:
        await server.stop(grace_s=0)


async def serve_weights(listen: str, security: Security) -> None:
    async with serving_contents(lambda *_: None, listen=listen, setting="listen", security=security):
        pass


@pytest.mark.parametrize("start", [start_server, serve_weights])
async def test_a_plain_listener_that_others_reach_is_refused_or_warned_of(start):
    with pytest.raises(ConfigError, match=r"^listen: 0.0.0.0:0 is reached from other machines.*PENSTOCK_TLS_CERT"):
        await start("0.0.0.0:0", NO_SECURITY)
    await start("127.0.0.1:0", NO_SECURITY)
    allowed = Security(allows_plain=True)
    with structlog.testing.capture_logs() as lines:
        await start("0.0.0.0:0", allowed)
        await start("127.0.0.1:0", allowed)
    warnings = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("listen: 0.0.0.0:0 is in plain text (insecure: true)")
    assert allowed.plain_listeners == ["0.0.0.0:0"]


@pytest.mark.parametrize("start", [start_server, serve_weights])
async def test_no_token_is_taken_in_plain_text_on_loopback_either(start):
    for security in (Security(token="secret"), Security(ca_file=Path("ca")), Security(accepted_tokens=("secret",))):
        with pytest.raises(ConfigError, match=r"^PENSTOCK_TLS_CERT: missing, so listen 127.0.0.1:0 would be in plain"):
            await start("127.0.0.1:0", security)


async def test_no_channel_shows_a_token_in_plain_text(tmp_path):
    certificate = tmp_path / "c.pem"
    for security in (
        Security(token="secret"),
        Security(token="secret", cert_file=certificate, key_file=certificate),
    ):
        with pytest.raises(ConfigError, match=r"PENSTOCK_TLS_CA: missing, so the token would go to 127\.0\.0\.1:1"):
            open_channel("127.0.0.1:1", security)
    await open_channel("127.0.0.1:1", Security(token="secret", allows_plain=True)).close()
