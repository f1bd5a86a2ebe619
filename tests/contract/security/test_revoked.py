"""A revoked certificate: refused by gRPC and HTTP servers without a restart, and by its machine's own check."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from contextlib import AsyncExitStack, suppress

import aiohttp
import grpc
import pytest
import yaml

from console.certs.commands import revoke_command
from console.deploy.machine_check import check_machine
from penstock.config import ConfigError
from penstock.errors import BadTokenError, UnknownRunError
from penstock.network import rpc
from penstock.security.revocations import LOOK_EVERY_S, REVOKED_FILE, Revocations
from penstock.transfer.content_server import serving_contents
from penstock.transfer.rate import ByteRate
from penstock.v1 import broker_pb2, broker_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tests.contract.security.test_http_access import LISTENERS, weights
from tests.contract.security.test_http_access import ask as http_ask
from tests.helpers.certificates import issue, make_authority
from tests.helpers.serving import serving
from tests.helpers.waiting import until

IN_TIME_S = LOOK_EVERY_S + 20.0
"""Much more than it takes: the machine may be busy."""


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self):
        self.num_ended = 0

    async def GetPlan(self, _request, _context):
        raise UnknownRunError("r", run_id="r")

    async def WatchPlan(self, _request, _context):
        try:
            yield scheduler_pb2.WatchPlanResponse()
            await asyncio.Event().wait()
        finally:
            self.num_ended += 1


class Broker(broker_pb2_grpc.BrokerServiceServicer):
    def __init__(self):
        self.num_ended = 0

    async def StreamTokens(self, requests, _context):
        async for _ in requests:
            yield broker_pb2.StreamTokensResponse()

    async def ExportTrajectories(self, _request, _context):
        try:
            while True:
                yield broker_pb2.ExportTrajectoriesResponse(group={"prompt": {"text": "g" * 2**20}})
        finally:
            self.num_ended += 1


async def _status(base, holder):
    async with aiohttp.ClientSession() as session:
        return await http_ask(session, "GET", f"{base}/weights/r/content", of=holder)


async def test_a_revoked_certificate_is_refused_in_one_line_and_a_new_one_of_the_same_holder_is_not(
    tmp_path, monkeypatch, capsys
):
    authority = make_authority(tmp_path / "authority")
    server = issue(authority, name="server")
    revoked, other = (issue(authority, roles=["generator"], name=name) for name in ("gpu-1", "gpu-2"))

    async def ask(channel):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with pytest.raises(UnknownRunError):
            await rpc.call(stub.GetPlan, scheduler_pb2.GetPlanRequest(run_id="r"), peer="scheduler")

    async with (
        serving(rpc.service_of(Scheduler()), security=server) as (_, target),
        weights(server) as base,
        rpc.open_channel(target, revoked) as channel,
        rpc.open_channel(target, other) as beside,
    ):
        await ask(channel)
        assert (await _status(base, revoked))[0] == 200

        assert revoke_command("gpu-1", directory=authority) == 0
        shutil.copy(authority / REVOKED_FILE, server.ca_file.with_name(REVOKED_FILE))
        line = "the certificate of 'gpu-1' .* was revoked; issue its holder another one with: penstock certs issue"
        with pytest.raises(BadTokenError, match=line):
            await ask(channel)
        status, text = await _status(base, revoked)
        assert (status, "was revoked; issue its holder another one" in text) == (401, True)
        await ask(beside)
        assert (await _status(base, other))[0] == 200

        # Its machine says so before anything starts there, if it has the list.
        shutil.copy(authority / REVOKED_FILE, revoked.ca_file.with_name(REVOKED_FILE))
        for name in ("ca", "cert", "key"):
            monkeypatch.setenv(f"PENSTOCK_TLS_{name.upper()}", str(getattr(revoked, f"{name}_file")))
        described = {"name": "gpu-1", "run_id": "r", "site": "s", "role": "generator", "host": "127.0.0.1"}
        (tmp_path / "machine.yaml").write_text(yaml.safe_dump(described))
        (problem,) = check_machine(tmp_path / "machine.yaml")
        assert "gpu-1: PENSTOCK_TLS_CERT: " in problem
        assert "was revoked; issue its holder another one" in problem

        again = issue(authority, roles=["generator"], name="gpu-1")
        async with rpc.open_channel(target, again) as renewed:
            await ask(renewed)
        assert (await _status(base, again))[0] == 200
    with pytest.raises(ConfigError, match="has issued it no certificate that is valid"):
        revoke_command("gpu-9", directory=authority)
    assert "Copy it beside the ca.pem of every machine" in capsys.readouterr().out


async def _end_of(call):
    """The error that a stream ends with."""
    async with asyncio.timeout(IN_TIME_S):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error
    raise AssertionError("it ended well")


async def test_streams_that_are_open_end_with_the_line_whatever_their_client_does(tmp_path):
    authority = make_authority(tmp_path / "authority")
    server = issue(authority, name="server")
    revoked, other = (issue(authority, name=name) for name in ("gpu-1", "gpu-2"))
    scheduler, broker = Scheduler(), Broker()
    async with (
        serving(rpc.service_of(scheduler), rpc.service_of(broker), security=server) as (_, target),
        rpc.open_channel(target, revoked) as channel,
        rpc.open_channel(target, revoked) as full,
        rpc.open_channel(target, other) as beside,
    ):
        silent, goes_on = (
            scheduler_pb2_grpc.SchedulerServiceStub(each).WatchPlan(scheduler_pb2.WatchPlanRequest())
            for each in (channel, beside)
        )
        both_ways = broker_pb2_grpc.BrokerServiceStub(channel).StreamTokens()
        await both_ways.write(broker_pb2.StreamTokensRequest())
        unread = broker_pb2_grpc.BrokerServiceStub(full).ExportTrajectories(broker_pb2.ExportTrajectoriesRequest())
        for call in (silent, goes_on, both_ways, unread):
            assert await call.read() is not grpc.aio.EOF

        assert revoke_command("gpu-1", directory=authority) == 0
        shutil.copy(authority / REVOKED_FILE, server.ca_file.with_name(REVOKED_FILE))
        # The server has done with all of them, also with the one whose client reads nothing.
        await until(lambda: (scheduler.num_ended, broker.num_ended) == (1, 1), timeout_s=IN_TIME_S)
        for call in (silent, both_ways, unread):
            ended = await _end_of(call)
            assert ended.code() == grpc.StatusCode.UNAUTHENTICATED
            assert "the certificate of 'gpu-1'" in ended.details()
            assert "was revoked; issue its holder another one with: penstock certs issue" in ended.details()
        assert not goes_on.done()
        goes_on.cancel()


async def _opened(base, holder):
    """A connection on which a request was answered, or is being answered, by a route that the holder may use."""
    tls = ssl.create_default_context(cafile=str(holder.ca_file))
    tls.load_cert_chain(holder.cert_file, holder.key_file)
    host, _, port = base.rpartition("//")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    writer.write(b"GET /weights/r/c HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def test_connections_that_are_open_are_cut_in_the_midst_of_an_answer_or_after_it(tmp_path):
    authority = make_authority(tmp_path / "authority")
    server = issue(authority, name="server")
    revoked, other = (issue(authority, name=name) for name in ("gpu-1", "gpu-2"))
    content = tmp_path / "content"
    content.write_bytes(bytes(64 * 2**20))
    slowly = serving_contents(
        lambda *_: content, listen="127.0.0.1:0", setting="listen", security=server, rate=ByteRate(2**20)
    )
    async with AsyncExitStack() as stack:
        bases = [await stack.enter_async_context(slowly)]
        for name in ("openai", "probe", "page"):
            bases.append(await stack.enter_async_context(LISTENERS[name][0](server)))
        opened = [await _opened(base, revoked) for base in bases]
        kept = [await _opened(base, other) for base in bases]
        revoke_command("gpu-1", directory=authority)
        shutil.copy(authority / REVOKED_FILE, server.ca_file.with_name(REVOKED_FILE))
        for reader, _ in opened:
            async with asyncio.timeout(IN_TIME_S):
                with suppress(ConnectionError):
                    assert len(await reader.read()) < 32 * 2**20
        for reader, writer in kept:
            assert not reader.at_eof()
            writer.transport.abort()


def test_a_list_that_cannot_be_read_leaves_the_one_before_in_force(tmp_path):
    path = tmp_path / REVOKED_FILE
    path.write_text("ff gpu-1\n")
    revocations = Revocations(path)
    with pytest.raises(BadTokenError, match="'gpu-1'"):
        revocations.check(255)
    path.write_text("not hexadecimal\n")
    with pytest.raises(BadTokenError, match="'gpu-1'"):
        revocations.check(255)
    revocations.check(254)
    path.unlink()
    revocations.check(255)
