"""Publishing a policy version: the manifest of its file, and the HTTP server of the content.

The backend writes the file (`Backend.write_weights`). Promises:

- A version is offered once its file is complete, with digests computed from the file.
- A delta against the one published before it follows (`delta_maker`), unless that saves less than a tenth of the bytes.
- Writing, digesting and comparing happen outside the event loop; training continues meanwhile.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import structlog
from prometheus_client import Counter

from penstock import tracing
from penstock.clock import Clock
from penstock.errors import InvalidFieldError
from penstock.model.digests import manifest_digest
from penstock.network.rpc import MAX_MESSAGE_BYTES
from penstock.process.tasks import uninterrupted
from penstock.security import Security
from penstock.transfer.chunks import chunks_of
from penstock.transfer.content_server import serving_contents
from penstock.transfer.rate import ByteRate
from penstock.v1 import weights_pb2
from penstock.wire.timestamps import timestamp
from services.trainer.publishing.delta_maker import DeltaMaker
from services.trainer.publishing.deltas import Published
from services.trainer.publishing.version_store import WeightStore
from services.trainer.publishing.written_weights import OfferTimes, WrittenWeights

_log = structlog.get_logger()
MAX_MANIFEST_BYTES = MAX_MESSAGE_BYTES - 1024**2
"""As a message, with space for its envelope."""
SERVED_BYTES = Counter("penstock_trainer_weights_served_bytes", "Bytes of weights sent to receivers")


class WeightPublisher:
    """Publishes the versions of one run into `directory`, which it owns: existing files are deleted."""

    def __init__(self, *, store: WeightStore, run_id: str, directory: Path, base_url: str, clock: Clock) -> None:
        self._store = store
        self._run_id = run_id
        self._directory = directory
        self._base_url = base_url.rstrip("/")
        self._clock = clock
        self._deltas = DeltaMaker(store=store, describe=self._describe_delta)
        self._last: Published | None = None
        self._instance_id, self._epoch = "", 0
        self._publishing: asyncio.Future[None] | None = None
        self.last_s = 0.0
        """Duration of the last publication that was started by `begin` and has ended, seconds."""
        self.last_offer: OfferTimes | None = None
        """Of that publication."""

    def open(self, *, instance_id: str = "", epoch: int = 0) -> None:
        """Start with an empty folder and an empty store; manifests will name this instance and epoch."""
        self._instance_id, self._epoch = instance_id, epoch
        if self._directory.is_symlink():
            # Its target does not belong to this run and must be neither emptied nor filled.
            self._directory.unlink()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        self._last = None
        self._store.reset(self._run_id)

    def path(self, *, policy_version: int, history: int) -> Path:
        """Where a version's file is to be written."""
        return self._directory / f"v{policy_version}-h{history}.safetensors"

    async def publish(
        self,
        written: Future[WrittenWeights],
        *,
        policy_version: int,
        history: int,
        adapter: weights_pb2.AdapterInfo | None = None,
    ) -> None:
        """Offer a version once it is written.

        Args:
            written: Its file, at `path`.
            policy_version: The version it is.
            history: The run's history counter.
            adapter: How the tensors are applied if they are an adapter.

        Raises:
            InvalidFieldError: The list of its tensors and chunks fits no message.
            OSError: The disk refuses.
        """
        weights = await asyncio.wrap_future(written)
        version = await asyncio.to_thread(self._prepare, weights, policy_version, history, adapter)
        self._store.add(version)
        _log.info("version published", policy_version=policy_version, digest=version.manifest.digest)
        if self._last is not None:
            self._deltas.begin(self._last, version)
        self._last = version

    def begin(
        self,
        written: Future[WrittenWeights],
        *,
        policy_version: int,
        history: int,
        adapter: weights_pb2.AdapterInfo | None,
        stepped_s: float | None = None,
    ) -> None:
        """Publish a version in the background; the previous publication must have ended (`finish`).

        Arguments as `publish`; `stepped_s` is when its optimiser step ended, by the clock (by default now).
        """
        begun_s = self._clock.monotonic_s()
        since_s = begun_s if stepped_s is None else stepped_s

        async def publish() -> None:
            await self.publish(written, policy_version=policy_version, history=history, adapter=adapter)
            offered_s, weights = self._clock.monotonic_s(), written.result()
            self.last_s = offered_s - begun_s
            self._record(policy_version, history)
            self.last_offer = OfferTimes(
                offer_s=offered_s - since_s,
                write_s=weights.write_s,
                digest_s=weights.digest_s,
                num_bytes=sum(chunk.size_bytes for chunk in weights.chunks),
            )

        self._publishing = asyncio.ensure_future(publish())

    def _record(self, policy_version: int, history: int) -> None:
        end_s = self._clock.now_s()
        tracing.record(
            tracing.Span(
                name="rl.weights.publish",
                run_id=self._run_id,
                start_s=end_s - self.last_s,
                end_s=end_s,
                parent=tracing.step_context(self._run_id, policy_version, history),
                attributes={
                    "rl.policy.version": policy_version,
                    "rl.weights.digest": self._last.manifest.digest if self._last is not None else "",
                    "rl.weights.bytes": self._last.manifest.size_bytes if self._last is not None else 0,
                },
            )
        )

    async def finish(self) -> None:
        """Returns when the last version that was begun is offered; raises, once, what publishing raised.

        Its delta may still be in the making.
        """
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            await uninterrupted(publishing)

    async def finish_deltas(self) -> None:
        """Returns when no delta between the versions offered so far is being made any more."""
        await self._deltas.finish()

    async def close(self) -> None:
        """Wait until nothing is being published; a failure is only logged, since the run ends for another reason.

        A delta that is being made is given up.
        """
        try:
            await self.finish()
        except Exception as error:  # Whatever it is, it must not hide the run's outcome.
            _log.error("the last version was not published", error=str(error))
        await self._deltas.close()

    def _prepare(
        self, written: WrittenWeights, policy_version: int, history: int, adapter: weights_pb2.AdapterInfo | None
    ) -> Published:
        manifest = weights_pb2.WeightsManifest(
            run_id=self._run_id,
            policy_version=policy_version,
            history=history,
            instance_id=self._instance_id,
            epoch=self._epoch,
            kind=weights_pb2.WEIGHTS_KIND_FULL if adapter is None else weights_pb2.WEIGHTS_KIND_ADAPTER,
            encoding=weights_pb2.WEIGHTS_ENCODING_SAFETENSORS,
            tensors=written.tensors,
            digest=manifest_digest(written.tensors),
            publish_time=timestamp(self._clock.now_s()),
            adapter=adapter,
        )
        self._describe_content(manifest, written.path, written.chunks)
        if manifest.ByteSize() > MAX_MANIFEST_BYTES:
            raise InvalidFieldError(
                f"the manifest of {len(manifest.tensors)} tensors and {len(manifest.chunks)} chunks has "
                f"{manifest.ByteSize()} bytes, at most {MAX_MANIFEST_BYTES} can be sent; store the model with fewer, "
                "larger tensors",
                field="manifest",
            )
        return Published(manifest=manifest, path=written.path)

    def _describe_delta(self, delta: Published) -> None:
        self._describe_content(delta.manifest, delta.path, chunks_of(delta.path))

    def _describe_content(
        self, manifest: weights_pb2.WeightsManifest, path: Path, chunks: Iterable[weights_pb2.ChunkInfo]
    ) -> None:
        """Fill in the size, chunks and address of the file at `path`."""
        del manifest.chunks[:]
        manifest.chunks.extend(chunks)
        manifest.size_bytes = path.stat().st_size
        manifest.urls[:] = [f"{self._base_url}/weights/{self._run_id}/{path.name}"]


def serving_weights(
    store: WeightStore,
    *,
    listen: str,
    security: Security,
    max_bytes_per_second: float | None = None,
) -> AbstractAsyncContextManager[str]:
    """Serve the store's content over HTTP with ranged GETs; yields the base address.

    Raises:
        PortUnavailableError: `listen` cannot be listened on.
    """
    return serving_contents(
        store.content,
        listen=listen,
        setting="weights_listen",
        security=security,
        rate=ByteRate(max_bytes_per_second) if max_bytes_per_second is not None else None,
        on_served=SERVED_BYTES.inc,
    )
