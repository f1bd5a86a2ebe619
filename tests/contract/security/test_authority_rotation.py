"""An authority added to the file is trusted from then on, and one removed is no more: without a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.errors import BadCertificateError
from penstock.network.rpc import call, open_channel
from penstock.security import Security, certificate_files
from penstock.security.checks import troubles
from penstock.security.checks.troubles import Troubles
from services.trainer.publishing.publisher import serving_weights
from services.trainer.publishing.version_store import WeightStore
from tests.helpers.certificates import issue, make_authority
from tests.helpers.serving import serving


@pytest.fixture(autouse=True)
def _looks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_files, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(troubles, "RECHECK_S", 0.0)


async def ask(target: str, security: Security) -> str:
    """Over a new connection; what is wrong, if anything is."""
    async with open_channel(target, security) as channel:
        method, request = health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()
        try:
            await call(method, request, peer=f"broker {target}", timeout_s=30)
        except BadCertificateError as error:
            return str(error)
        return ""


async def test_servers_follow_the_authorities_file(tmp_path: Path) -> None:
    old, new = make_authority(tmp_path / "old"), make_authority(tmp_path / "new")
    server, stranger = issue(old), issue(new)
    # It trusts the servers, and shows what the new authority signed.
    client = replace(stranger, ca_file=old / "ca.pem")
    assert server.ca_file is not None
    only_old = server.ca_file.read_bytes()
    async with (
        serving(security=server) as (_, target),
        serving_weights(WeightStore(), listen="127.0.0.1:0", security=server) as url,
    ):
        for trusted, is_refused in (
            (only_old, True),
            (only_old + (new / "ca.pem").read_bytes(), False),
            (only_old, True),
        ):
            server.ca_file.write_bytes(trusted)
            over_http = await Troubles().trouble_with_url(url, client.tls_files)
            assert ("refuses this process's certificate" in await ask(target, client)) == is_refused
            assert ("refuses this process's certificate" in over_http) == is_refused


async def test_an_open_channel_follows_the_authorities_file(tmp_path: Path) -> None:
    old, new = make_authority(tmp_path / "old"), make_authority(tmp_path / "new")
    client, server = issue(old), issue(new)
    assert client.ca_file is not None
    both = client.ca_file.read_bytes() + (new / "ca.pem").read_bytes()
    # The server trusts both from the beginning.
    assert server.ca_file is not None
    server.ca_file.write_bytes(both)
    async with serving(security=server) as (_, target), open_channel(target, client) as channel:
        method, request = health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()
        with pytest.raises(BadCertificateError, match="does not hold"):
            await call(method, request, peer=f"broker {target}", timeout_s=30)
        client.ca_file.write_bytes(both)
        await call(method, request, peer=f"broker {target}", timeout_s=30)
