"""Installs published weights in flight: watch, fetch, install, attest, report.

    manifest -> file in the cache -> engine -> attested -> reported to the store
                   |  digest wrong      |  digest wrong
                   +--------------------+--> refused, counted, fetched again; the old version stays

Promises:

- A version counts as loaded (and is named in heartbeats) only once the digest read back by the engine equals the
  published one.
- Only the newest version is wanted: while one is being installed, those in between are skipped.
- No install takes the engine back: a request that a newer version overtakes is answered with that one.
- Weights of another run of this id, or of a replaced trainer, are not installed: the broker names the run's owner.
- One install at a time. Weights that cannot be attested after MAX_ENGINE_MISMATCHES attempts end the process, because
  an engine that does not hold what it was given cannot be trusted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.clients.weights import WeightsClient
from penstock.downloads.downloader import Downloader
from penstock.errors import DigestMismatchError, FencedError, PenstockError, UnknownVersionError
from penstock.model.adapter_layout import adapter_of
from penstock.network.rpc import backoff_s
from penstock.tracing.measuring import measuring
from penstock.v1 import broker_pb2, weights_pb2
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.engine import Engine, UpdateMode, UpdateReport, WeightUpdate
from services.generator.metrics import GeneratorMetrics
from services.generator.weights.file_cache import Fetched, WeightFetcher

MAX_ENGINE_MISMATCHES = 3
Drained = Callable[[], AbstractAsyncContextManager[None]]
"""Inside, nothing is decoded; raises DeadlineError if that takes too long."""

_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class PullCounters:
    """Counts since start."""

    num_updates: int = 0
    num_refused: int = 0
    max_pause_s: float = 0.0
    total_pause_s: float = 0.0
    num_recomputed_tokens: int = 0


class WeightPuller:
    """Keeps the engine on the newest published version.

    Args:
        client: The weight store.
        downloader: Fetches contents; entered already.
        engine: Started already when `run` or `pull` is called.
        held: Receives attested versions.
        drained: For updates that must not meet running samples.
        cache_dir: Folder of this generator's weight files.
        metrics: Counts swaps and refusals.
        mode: What happens to running samples when an announced version is taken.
    """

    def __init__(
        self,
        *,
        client: WeightsClient,
        downloader: Downloader,
        engine: Engine,
        held: AttestedWeights,
        drained: Drained,
        cache_dir: Path,
        metrics: GeneratorMetrics,
        mode: UpdateMode = UpdateMode.KEEP,
    ) -> None:
        self._client = client
        self._engine = engine
        self._held = held
        self._drained = drained
        self._metrics = metrics
        self._mode = mode
        self._fetcher = WeightFetcher(
            client=client, downloader=downloader, cache_dir=cache_dir, metrics=metrics, on_refused=self._note_refused
        )
        self._wanted: weights_pb2.WeightsManifest | None = None
        self._announced = asyncio.Event()
        self._owner: broker_pb2.RunOwner | None = None
        """The run's owner as last reported by the broker; None before that."""
        self._installing = asyncio.Lock()
        self._pulls: set[asyncio.Task[UpdateReport]] = set()
        self._num_engine_mismatches = 0
        self.counters = PullCounters()
        self.relay_wait = downloader.relay_wait
        """Leaves versions to another machine of the site; None without a site."""

    def note_owner(self, owner: broker_pb2.RunOwner) -> None:
        """The broker reports the run's owner."""
        self._owner = owner
        self._announced.set()

    async def watch(self) -> None:
        """Note what the store publishes, until cancelled; raises PenstockError if a retry cannot help."""
        await self._client.watch(self._announce, self._note_refused)

    async def run(self) -> None:
        """Install what is announced, until cancelled. Raises DigestMismatchError, EngineError: end the process."""
        delays = backoff_s()
        while True:
            if not self._is_behind():
                self._announced.clear()
                await self._announced.wait()
                delays = backoff_s()
            manifest = self._wanted
            if manifest is None or not self._is_behind():
                continue
            try:
                await self._install(manifest, self._mode)
                continue
            except UnknownVersionError as error:
                # Pruned while it was fetched: the store keeps only the newest, and announces it.
                _log.info("version is gone", policy_version=manifest.policy_version, error=str(error))
                await self._ask_for_newest()
            except (PenstockError, OSError) as error:
                self._give_up_on_engine(error)
                _log.warning("weights not taken", policy_version=manifest.policy_version, error=str(error))
            await asyncio.sleep(next(delays))

    async def pull(self, policy_version: int | None, mode: UpdateMode | None = None) -> UpdateReport:
        """Fetch and install a version (the newest if None) now; returns at once if it or a newer one is loaded.

        Without a mode, that of announced versions applies.

        Raises:
            UnknownVersionError: Not published.
            DigestMismatchError: The content or the engine does not match the manifest.
            FencedError: The trainer that published it no longer owns the run.
            EngineError: The engine failed.
        """
        manifest = await self._client.get_manifest(policy_version)
        # Must not be interrupted by a caller that goes away: half an update is no version.
        task = asyncio.create_task(self._install(manifest, mode or self._mode))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)
        return await asyncio.shield(task)

    def _announce(self, manifest: weights_pb2.WeightsManifest) -> None:
        if self._is_fenced(manifest):
            _log.warning(
                "weights of a trainer that is not the run's are left",
                policy_version=manifest.policy_version,
                instance_id=manifest.instance_id,
                epoch=manifest.epoch,
            )
        self._wanted = manifest
        self._announced.set()

    async def _ask_for_newest(self) -> None:
        try:
            self._announce(await self._client.get_manifest())
        except PenstockError as error:
            _log.info("no newer manifest", error=str(error))

    def _note_refused(self, error: PenstockError) -> None:
        self.counters.num_refused += 1
        self._metrics.weights_refused.inc()
        _log.warning("weights refused", error=str(error))

    def _is_behind(self) -> bool:
        """Whether the announced version is one to install; see `_order`."""
        held, wanted = self._held.current, self._wanted
        if wanted is None or self._is_fenced(wanted):
            return False
        if held is None or not self._held.is_trusted or held.instance_id != wanted.instance_id:
            return True
        return _order(wanted) > _order(held)

    def _is_fenced(self, manifest: weights_pb2.WeightsManifest) -> bool:
        owner = self._owner
        return owner is not None and (manifest.instance_id != owner.instance_id or manifest.epoch < owner.epoch)

    def _check_owner(self, manifest: weights_pb2.WeightsManifest) -> None:
        if self._owner is not None and self._is_fenced(manifest):
            raise FencedError(
                f"version {manifest.policy_version} was published in epoch {manifest.epoch} of instance "
                f"{manifest.instance_id!r}, but the run is trained in epoch {self._owner.epoch} of instance "
                f"{self._owner.instance_id!r}: it is not installed"
            )

    def _held_instead(self, manifest: weights_pb2.WeightsManifest) -> weights_pb2.WeightsManifest | None:
        """The loaded weights, if they are the manifest's version or a newer one that arrived meanwhile."""
        held = self._held.current
        if held is None or not self._held.is_trusted or held.instance_id != manifest.instance_id:
            return None
        is_same = held.digest == manifest.digest and _order(held) == _order(manifest)
        return held if is_same or _order(held) > _order(manifest) else None

    def _holds_content(self, manifest: weights_pb2.WeightsManifest) -> bool:
        """Whether the engine holds these very weights under this number, regardless of the publisher."""
        held = self._held.current
        return (
            held is not None
            and self._held.is_trusted
            and (held.policy_version, held.digest) == (manifest.policy_version, manifest.digest)
        )

    async def _install(self, manifest: weights_pb2.WeightsManifest, mode: UpdateMode) -> UpdateReport:
        async with self._installing:
            self._check_owner(manifest)
            held = self._held_instead(manifest)
            if held is not None:
                return UpdateReport(policy_version=held.policy_version, digest=held.digest, pause_s=0.0)
            if self._holds_content(manifest):
                await self._held.attest(manifest)
                await self._report(manifest, pause_s=0.0, fetched=None)
                return UpdateReport(policy_version=manifest.policy_version, digest=manifest.digest, pause_s=0.0)
            with measuring("rl.weights.update", {"rl.policy.version": manifest.policy_version}) as measured:
                fetched = await self._fetcher.fetch(manifest)
                # That may have taken minutes.
                self._check_owner(manifest)
                report = await self._update_engine(manifest, fetched.path, mode)
                measured.attributes |= {
                    "rl.weights.bytes": fetched.fetched_bytes,
                    "rl.weights.origin_bytes": fetched.origin_bytes,
                    "rl.pause_s": report.pause_s,
                }
                await self._report(manifest, pause_s=report.pause_s, fetched=fetched)
            await asyncio.to_thread(self._fetcher.clean, fetched.path)
            return report

    async def _update_engine(self, manifest: weights_pb2.WeightsManifest, path: Path, mode: UpdateMode) -> UpdateReport:
        update = WeightUpdate(
            policy_version=manifest.policy_version,
            path=path,
            tensors=manifest.tensors,
            digest=manifest.digest,
            adapter=adapter_of(manifest),
            is_recomputing=mode is UpdateMode.RECOMPUTE,
        )
        try:
            async with AsyncExitStack() as stack:
                if mode is UpdateMode.DRAIN:
                    await stack.enter_async_context(self._drained())
                report = await self._engine.update_weights(update)
            if report.digest != manifest.digest:
                raise DigestMismatchError(f"the engine holds {report.digest}, version states {manifest.digest}")
        except DigestMismatchError as error:
            # The file was right when it arrived, so the engine is not.
            self._num_engine_mismatches += 1
            self._held.distrust()
            self._note_refused(error)
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise
        self._num_engine_mismatches = 0
        await self._held.attest(manifest)
        self._count(report)
        return report

    async def _report(self, manifest: weights_pb2.WeightsManifest, *, pause_s: float, fetched: Fetched | None) -> None:
        """Tell the store that the version is loaded; `fetched` is None if nothing had to be fetched."""
        try:
            await self._client.report_holding(
                policy_version=manifest.policy_version,
                digest=manifest.digest,
                swap_pause_s=pause_s,
                fetched_bytes=fetched.fetched_bytes if fetched is not None else 0,
                origin_bytes=fetched.origin_bytes if fetched is not None else 0,
            )
        except DigestMismatchError as error:
            self._held.distrust()
            self._note_refused(error)
            raise
        except PenstockError as error:
            # The store is away or has moved on: the loaded weights are attested all the same.
            _log.info("holding not reported", policy_version=manifest.policy_version, error=str(error))

    def _give_up_on_engine(self, error: Exception) -> None:
        if self._num_engine_mismatches >= MAX_ENGINE_MISMATCHES:
            raise error

    def _count(self, report: UpdateReport) -> None:
        self.counters.num_updates += 1
        self.counters.max_pause_s = max(self.counters.max_pause_s, report.pause_s)
        self.counters.total_pause_s += report.pause_s
        self.counters.num_recomputed_tokens += report.num_recomputed_tokens
        self._metrics.swaps.inc()
        self._metrics.recomputed_tokens.inc(report.num_recomputed_tokens)
        self._metrics.swap_pause_s.observe(report.pause_s)
        self._metrics.policy_version.set(report.policy_version)
        _log.info(
            "weights installed",
            policy_version=report.policy_version,
            pause_s=round(report.pause_s, 4),
            num_recomputed_tokens=report.num_recomputed_tokens,
        )


def _order(manifest: weights_pb2.WeightsManifest) -> tuple[int, int, int]:
    """Sort key: of two versions of one instance the newer is greater, whatever their numbers."""
    return manifest.epoch, manifest.history, manifest.policy_version
