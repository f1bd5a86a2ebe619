"""Weights that cannot be fetched say why: TLS, or an address that leads nowhere from here; the trainer hears of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.clients.weights import content_id
from penstock.downloads.downloader import Downloader
from penstock.errors import BadCertificateError
from penstock.security import NO_SECURITY, Security
from penstock.security.checks import troubles
from penstock.transfer import content_sources
from tests.helpers.certificates import issue, make_authority
from tests.helpers.waiting import until
from tests.helpers.weights.sites import Site, site

MB = 1_000_000


@pytest.fixture(autouse=True)
def _looks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubles, "RECHECK_S", 0.0)
    monkeypatch.setattr(content_sources, "MAX_FAILURES", 2)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return make_authority(tmp_path / "authority")


async def failure(made: Site, client: Security, *, scheme: str = "https") -> str:
    """What a fetch from the origin ends with; the same is said at *error*."""
    manifest = made.publish(size_bytes=1000)
    manifest.urls[:] = [url.replace("https", scheme) for url in manifest.urls]
    with capture_logs() as logs, pytest.raises(BadCertificateError) as failed:
        async with Downloader(security=client) as downloader:
            await downloader.fetch(manifest, made.folder / "fetched")
    said = [entry for entry in logs if entry["event"] == "weights cannot be fetched from there"]
    assert [entry["log_level"] for entry in said] == ["error"]
    assert said[0]["error"] == str(failed.value)
    return str(failed.value)


async def test_weights_over_tls_say_what_is_wrong_with_a_certificate(authority: Path, tmp_path: Path) -> None:
    good, other = issue(authority), issue(make_authority(tmp_path / "other"))
    async with site(tmp_path, security=good) as made:
        assert "was signed by 'Penstock test'" in await failure(made, other)
        without = replace(good, cert_file=None, key_file=None)
        plain = replace(good, allows_plain=True)
        assert "it speaks TLS, this process speaks plain text to it; write https://" in await failure(
            made, plain, scheme="http"
        )
        assert "it refuses clients without a certificate" in await failure(made, without)
        with_other = replace(good, cert_file=other.cert_file, key_file=other.key_file)
        assert "it refuses this process's certificate: PENSTOCK_TLS_CERT" in await failure(made, with_other)


async def test_tls_to_a_plain_server_is_reported(authority: Path, tmp_path: Path) -> None:
    async with site(tmp_path) as made:
        manifest = made.publish(size_bytes=1000)
        manifest.urls[:] = [url.replace("http", "https") for url in manifest.urls]
        async with Downloader(security=issue(authority)) as downloader:
            with pytest.raises(BadCertificateError, match="it speaks plain text, this process TLS"):
                await downloader.fetch(manifest, tmp_path / "fetched")


@pytest.mark.parametrize(
    ("relay", "level", "reason"),
    [
        ("http://no-such-machine.invalid:1", "error", "the name no-such-machine.invalid cannot be resolved"),
        ("http://127.0.0.1:1", "warning", "nothing listens there"),
    ],
)
async def test_an_unreachable_relay_is_logged_once_and_reported_to_the_trainer(
    tmp_path: Path, relay: str, level: str, reason: str
) -> None:
    async with site(tmp_path, security=NO_SECURITY) as made:
        receiver = await made.receiver("b")
        with capture_logs() as logs:
            for version in (1, 2):
                manifest = made.publish(version, size_bytes=1000)
                made.store.relays.sources(
                    site="s", content_id=content_id(manifest), receiver_id="a", relay_url=f"{relay}/weights/r/x"
                )
                assert (await receiver.fetch(manifest)).origin_bytes == manifest.size_bytes
        said = [entry for entry in logs if entry["event"] == "weights cannot be fetched from there"]
        assert [entry["log_level"] for entry in said] == [level]
        assert reason in said[0]["error"]
        assert "set relay_url=HOST:PORT of the generator there" in said[0]["error"]
        await until(lambda: bool(made.failures.lines()))
        assert made.failures.lines() == [f"weights of b: {said[0]['error']}"]
