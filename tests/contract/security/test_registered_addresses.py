"""Addresses that services register, over real gRPC and real TLS: nobody is sent to a host that is not the caller's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import structlog

from penstock.clients.weights import WeightsClient
from penstock.errors import PenstockError, from_rpc_error
from penstock.network.rpc import open_channel, service_of
from penstock.security import NO_SECURITY
from penstock.security.registered_addresses import OwnAddresses
from penstock.v1 import broker_pb2, weights_pb2, weights_pb2_grpc
from services.broker.storage.memory_store import MemoryStore
from services.trainer.publishing.version_store import TRUSTED_SETTING, WeightStore, WeightStoreService
from tests.helpers.brokers.broker import RUN
from tests.helpers.brokers.broker import serving as serving_broker
from tests.helpers.certificates import issue, make_authority
from tests.helpers.serving import serving

CONTENT = "c" * 64


@asynccontextmanager
async def weight_store(*, security=NO_SECURITY, trusted=()) -> AsyncIterator[str]:
    store = WeightStore()
    store.reset("r")
    service = service_of(WeightStoreService(store, own_addresses=OwnAddresses(trusted, setting=TRUSTED_SETTING)))
    async with serving(service, security=security) as (_, target):
        yield target


async def find(target, receiver, relay_url, *, security=NO_SECURITY):
    """What the store says to a receiver that registers a relay: others' relays, or why not."""
    async with open_channel(target, security) as channel:
        stub = weights_pb2_grpc.WeightStoreServiceStub(channel)
        request = weights_pb2.FindSourcesRequest(
            run_id="r", receiver_id=receiver, site="s", content_id=CONTENT, relay_url=relay_url
        )
        try:
            return list((await stub.FindSources(request, timeout=10, wait_for_ready=True)).relay_urls)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, peer="store")


def assert_refused(answer):
    assert isinstance(answer, PenstockError), answer
    assert (answer.reason, answer.metadata["field"]) == ("INVALID_FIELD", "relay_url")


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.5:80/admin",
        "http://169.254.169.254/latest/meta-data",
        "http://no-such-host.invalid:7000/w",
        "http://0.0.0.0:7000/w",
        "http://127.0.0.1@10.0.0.5/w",
        "http://127.0.0.1:7000/w?x=1",
        "file:///etc/passwd",
        "http://127.0.0.1\n.example/",
    ],
)
async def test_a_relay_that_is_not_the_callers_is_passed_on_to_no_one(url):
    async with weight_store() as target:
        assert_refused(await find(target, "evil", url))
        assert await find(target, "victim", "") == []


async def test_a_relay_of_the_same_machine_is_offered_to_the_next():
    async with weight_store() as target:
        assert await find(target, "a", "http://127.0.0.1:7000/w") == []
        assert await find(target, "b", "http://localhost:7001/w") == ["http://127.0.0.1:7000/w"]


async def test_what_the_trainers_configuration_trusts_is_taken():
    async with weight_store(trusted=("10.0.0.0/8", ".site.invalid")) as target:
        assert await find(target, "a", "http://10.0.0.5:7000/w") == []
        assert await find(target, "b", "http://gpu-1.site.invalid:7000/w") == ["http://10.0.0.5:7000/w"]
        assert_refused(await find(target, "c", "http://11.0.0.5:7000/w"))


async def test_a_certificate_vouches_for_its_names_and_tls_for_https_alone(tmp_path):
    authority = make_authority(tmp_path)
    trainer = issue(authority, roles=["trainer"], name="trainer")
    generator = issue(authority, roles=["generator"], run="r", name="gen", hosts=["gpu-1.invalid", "10.1.2.3"])
    async with weight_store(security=trainer) as target:

        async def said(url):
            return await find(target, "gen", url, security=generator)

        assert await said("https://gpu-1.invalid:7000/w") == []
        assert await said("https://10.1.2.3:7000/w") == []
        for url in ("http://gpu-1.invalid:7000/w", "https://gpu-2.invalid:7000/w", "https://10.1.2.4:7000/w"):
            assert_refused(await said(url))


async def test_a_generator_whose_relay_is_refused_says_so_once_and_is_served_by_others():
    async with weight_store() as target:
        assert await find(target, "a", "http://127.0.0.1:7000/w") == []
        async with WeightsClient(target, run_id="r", receiver_id="b", site="s") as client:
            with structlog.testing.capture_logs() as logs:
                for _ in range(2):
                    found = await client.find_relays(CONTENT, "http://10.0.0.5:7000/w")
                    assert found == ["http://127.0.0.1:7000/w"]
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert len(errors) == 1
    assert "10.0.0.5" in errors[0]["error"]
    assert "trusted_relay_hosts" in errors[0]["error"]


async def test_what_a_receiver_says_of_its_relay_with_a_report_is_an_address_at_least():
    async with weight_store() as target, open_channel(target) as channel:
        request = weights_pb2.ReportHoldingRequest(run_id="r", receiver_id="a", relay_url="file:///etc/passwd")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await weights_pb2_grpc.WeightStoreServiceStub(channel).ReportHolding(request, wait_for_ready=True)
    assert_refused(from_rpc_error(caught.value, peer="store"))


@pytest.mark.parametrize("endpoint", ["http://10.0.0.5/x", "a b:1", "host:port", "x\n:1", "unix:/run/x", "h:1@g:2"])
async def test_where_a_generator_says_it_listens_is_host_and_port_or_nothing(endpoint):
    async with serving_broker(MemoryStore()) as broker:
        await broker.open()
        hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id="g", max_context_tokens=8, endpoint=endpoint)
        stream = broker.stub.StreamLeases(iter([broker_pb2.StreamLeasesRequest(hello=hello)]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert from_rpc_error(caught.value, peer="broker").metadata["field"] == "hello.endpoint"


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:7302", "0.0.0.0:0", "[::]:7302", ":7302", "gpu_1.example:7302"])
async def test_every_listen_address_of_a_generator_may_be_registered(endpoint):
    async with serving_broker(MemoryStore()) as broker:
        await broker.open()
        hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id="g", max_context_tokens=8, endpoint=endpoint)
        stream = broker.stub.StreamLeases()
        await stream.write(broker_pb2.StreamLeasesRequest(hello=hello))
        assert await stream.read() is not grpc.aio.EOF
        stream.cancel()
