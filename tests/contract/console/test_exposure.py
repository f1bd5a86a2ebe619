"""What other machines reach in plain text says so itself, and status shows it."""

from __future__ import annotations

import pytest

from console.inspect.exposure import exposure_lines
from console.inspect.find_run import Target
from penstock.network.rpc import Server
from penstock.security import NO_SECURITY, Security
from penstock.v1 import broker_pb2
from tests.helpers.certificates import make_security


async def lines_of(
    listen: str, security: Security, *, clients: Security = NO_SECURITY, plain: bool = False
) -> list[str]:
    server = Server(listen=listen, services=[], security=security)
    port = await server.start()
    run = broker_pb2.GetRunResponse()
    for number, is_plain in enumerate((plain, False)):
        hello = run.generators.add().hello
        hello.generator_id, hello.endpoint, hello.listens_in_plain_text = f"gen-{number}", "0.0.0.0:7302", is_plain
    try:
        target = Target(run_id="r", broker=f"127.0.0.1:{port}", folder=None, trainer="127.0.0.1:1")
        return [line.replace(str(port), "PORT") for line in await exposure_lines(target, run, clients)]
    finally:
        await server.stop(grace_s=0)


async def test_a_broker_and_generators_that_others_reach_in_plain_text_are_shown():
    assert await lines_of("0.0.0.0:0", Security(allows_plain=True), plain=True) == [
        "broker at 127.0.0.1:PORT is reached in plain text from other machines (insecure: true)",
        "gen-0 at 0.0.0.0:7302 is reached in plain text from other machines (insecure: true)",
    ]


@pytest.mark.parametrize("kind", ["loopback", "tls"])
async def test_nothing_is_said_of_loopback_and_of_tls(tmp_path, kind):
    security = Security(allows_plain=True) if kind == "loopback" else make_security(tmp_path)
    listen = "127.0.0.1:0" if kind == "loopback" else "0.0.0.0:0"
    clients = security if kind == "tls" else NO_SECURITY
    assert await lines_of(listen, security, clients=clients) == []
