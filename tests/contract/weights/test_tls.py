"""Weights over mutual TLS, at the addresses that `penstock run` and `penstock node` make."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from console.config.config import RunConfig
from console.config.derive import trainer_config
from console.launch.launcher import choose_addresses
from console.launch.ports import free_block
from console.node.assignment import Placement, generator_config
from console.node.config import NodeConfig
from penstock.config import ConfigError
from penstock.downloads.downloader import Downloader
from penstock.errors import InvalidFieldError
from penstock.network.http_server import public_url
from penstock.security import NO_SECURITY, Security
from penstock.transfer.content_server import serving_contents
from penstock.transfer.partial import PartialContent
from penstock.transfer.relay import Relay
from tests.helpers.certificates import make_security
from tests.helpers.weights.scripted_weight_store import make_manifest

CHUNK_BYTES = 64 * 1024


@pytest.fixture(params=["tls", "plain"])
def security(request, tmp_path) -> Security:
    return make_security(tmp_path, token="secret") if request.param == "tls" else NO_SECURITY


@pytest.fixture
def content(tmp_path) -> Path:
    path = tmp_path / "v0-h0"
    save_file({"w": np.arange(100_000, dtype=np.float32)}, path)
    return path


def manifest_at(url: str, content: Path):
    return make_manifest(content, policy_version=0, url=url, chunk_bytes=CHUNK_BYTES)


async def test_generators_get_weights_at_the_address_that_a_run_tells_its_trainer(tmp_path, content, security):
    run = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "listen": {"weights": f"127.0.0.1:{free_block(1)}"}}
    )
    trainer = trainer_config(run, choose_addresses(run))
    told = public_url(trainer.weights_url or "", setting="weights_url", security=security)
    async with (
        serving_contents(
            lambda _run_id, _name: content, listen=trainer.weights_listen, setting="weights_listen", security=security
        ),
        Downloader(security=security) as downloader,
    ):
        manifest = manifest_at(f"{told}/weights/r/{content.name}", content)
        await downloader.fetch(manifest, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == content.read_bytes()


async def test_machines_of_a_site_get_weights_at_the_address_that_a_node_tells_its_relay(tmp_path, content, security):
    node = NodeConfig.model_validate(
        {
            "node_id": "a",
            "gpu": "h800",
            "scheduler": "s:1",
            "dir": "/d",
            "generator": {"run_id": "r", "model_path": "/m", "cache_dir": "/c", "site": "r1"},
        }
    )
    settings = generator_config(node, Placement(gpus=(0,)), port=free_block(2))
    relay_url = public_url(settings.relay_url or "", setting="relay_url", security=security)
    async with (
        Relay(listen=settings.relay_listen or "", public_url=relay_url, security=security) as relay,
        Downloader(security=security) as downloader,
    ):
        manifest = manifest_at(relay.url("r", "c"), content)
        whole = await PartialContent.whole(content, manifest.chunks)
        relay.offer("r", "c", whole)
        whole.close()
        await downloader.fetch(manifest, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == content.read_bytes()


async def test_an_address_of_weights_says_http_only_where_its_server_does(tmp_path):
    security = make_security(tmp_path)
    with pytest.raises(ConfigError, match=r"weights_url: http://gpu:7305 is in plain text.*write gpu:7305"):
        public_url("http://gpu:7305", setting="weights_url", security=security)
    for address, credentials in (("https://proxy/x", security), ("https://proxy/x", NO_SECURITY)):
        assert public_url(address, setting="weights_url", security=credentials) == address


@asynccontextmanager
async def recording_listener():
    """A plain socket: what it is sent, and its port."""
    seen: list[bytes] = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(65536))
        writer.close()

    server = await asyncio.start_server(record, "127.0.0.1", 0)
    async with server:
        yield seen, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("has_tls", [True, False])
async def test_no_token_goes_to_an_address_in_plain_text_that_a_manifest_names(tmp_path, content, has_tls):
    security = make_security(tmp_path, token="secret") if has_tls else Security(token="secret")
    async with recording_listener() as (seen, port), Downloader(security=security) as downloader:
        manifest = manifest_at(f"http://127.0.0.1:{port}/weights/r/x", content)
        with pytest.raises(InvalidFieldError, match=r"in plain text.*PENSTOCK_TLS_CERT.*insecure: true"):
            await downloader.fetch(manifest, tmp_path / "fetched")
        assert seen == []
