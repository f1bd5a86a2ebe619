"""A real publisher and store and one receiver's cache, with a link between them where a test wants one."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from benchmarks.weights.link import ShapedLink, link_to
from penstock.clients.weights import WeightsClient
from penstock.clock import SystemClock
from penstock.downloads.downloader import Downloader
from penstock.model.digests import manifest_digest, safetensors_digests
from penstock.network.rpc import service_of
from penstock.security import NO_SECURITY
from penstock.v1 import weights_pb2
from services.generator.metrics import GeneratorMetrics
from services.generator.weights.file_cache import Fetched, WeightFetcher
from services.trainer.publishing.publisher import WeightPublisher, serving_weights
from services.trainer.publishing.version_store import WeightStore, WeightStoreService
from tests.helpers.serving import serving
from tests.helpers.weights.written import written

NUM_VALUES = 200_000


class PublishingSite:
    """A trainer's side and one receiver's side."""

    def __init__(self, folder: Path, *, num_values: int = NUM_VALUES) -> None:
        self.published = folder / "published"
        self.cache = folder / "cache"
        self.metrics = GeneratorMetrics(CollectorRegistry())
        self.refused: list[str] = []
        self.weights = {
            "embedding": torch.randn(num_values // 10, 10, generator=torch.Generator().manual_seed(1)).bfloat16(),
            "norm": torch.ones(1000, dtype=torch.float32),
        }
        self.version = -1
        self.store = WeightStore()
        self.link: ShapedLink
        self.client: WeightsClient
        self.fetcher: WeightFetcher

    async def start(self, stack: AsyncExitStack, **shape: float) -> None:
        url = await stack.enter_async_context(serving_weights(self.store, listen="127.0.0.1:0", security=NO_SECURITY))
        self.link = await stack.enter_async_context(link_to(int(url.rpartition(":")[2]), **shape))
        url = f"http://127.0.0.1:{self.link.port}" if shape else url
        service = service_of(WeightStoreService(self.store))
        _, self.target = await stack.enter_async_context(serving(service))
        self.publisher = WeightPublisher(
            store=self.store, run_id="r", directory=self.published, base_url=url, clock=SystemClock()
        )
        self.publisher.open()
        self.client = await stack.enter_async_context(WeightsClient(self.target, run_id="r", receiver_id="x"))
        self.fetcher = self.new_fetcher(self.client, await stack.enter_async_context(Downloader()))

    def new_fetcher(self, client: WeightsClient, downloader: Downloader, *, cache: Path | None = None) -> WeightFetcher:
        return WeightFetcher(
            client=client,
            downloader=downloader,
            cache_dir=cache or self.cache,
            metrics=self.metrics,
            on_refused=lambda error: self.refused.append(str(error)),
        )

    async def publish(self, *, share: float = 0.02, history: int = 0, with_delta: bool = True) -> None:
        """The next version: about `share` of the values moved a little; returns once its delta is offered, too."""
        self.version += 1
        noise = torch.Generator().manual_seed(100 + self.version)
        for name, tensor in self.weights.items():
            moved = torch.rand(tensor.shape, generator=noise) < share
            self.weights[name] = torch.where(moved, tensor * 1.01, tensor)
        path = self.publisher.path(policy_version=self.version, history=history)
        await self.publisher.publish(written(self.weights, path), policy_version=self.version, history=history)
        if with_delta:
            await self.publisher.finish_deltas()

    async def publish_noise(self) -> None:
        """The next version has nothing in common with the last one: not even the exponents."""
        shape = self.weights["embedding"].shape
        self.weights["embedding"] = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
        await self.publish(share=0.0)

    async def fetch(self) -> tuple[Fetched, weights_pb2.WeightsManifest]:
        """Take the newest version; what is in the file is checked against the manifest here once more."""
        manifest = await self.client.get_manifest()
        fetched = await self.fetcher.fetch(manifest)
        assert manifest_digest(safetensors_digests(fetched.path)) == manifest.digest
        return fetched, manifest

    def fallbacks(self) -> float:
        return self.metrics.delta_fallbacks._value.get()
