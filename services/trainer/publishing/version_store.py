"""Stores a run's published versions: their manifests, the paths of their content, and which receivers hold them.

Promises:

- A version is offered only when its content is complete on disk; at most the `max_kept` newest versions are.
- The newest version is the one published last: after a rewind, a lower version with a higher history replaces it.
- A reported digest that differs from the published one is refused (DIGEST_MISMATCH) and never recorded as held.
- Content is looked up by the names made here; no part of a request ever becomes a path.
- A receiver that reports what it holds is offered whatever takes the fewest bytes: deltas or the full content.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from penstock.clients.weights import MAX_FAILURE_CHARACTERS, content_id
from penstock.errors import (
    DigestMismatchError,
    InvalidFieldError,
    NotOfferedError,
    ServiceUnavailableError,
    UnknownVersionError,
)
from penstock.process.tasks import set_within
from penstock.security.registered_addresses import MAX_URL_CHARACTERS, OwnAddresses, Peer, check_url
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock.wire.timestamps import duration
from services.trainer.publishing.broadcasts import Broadcasts
from services.trainer.publishing.deltas import ExpectedDelta, Published, PublishedDeltas
from services.trainer.publishing.relay_tree import SiteRelays
from services.trainer.publishing.source_failures import SourceFailures

MAX_KEPT_VERSIONS = 3
MAX_KNOWN_DIGESTS = 256
MAX_HOLDINGS = 4096
MAX_NAME_CHARACTERS = 128
WATCH_POLL_S = 1.0
TRUSTED_SETTING = "trusted_relay_hosts of the trainer's own configuration"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A receiver's report that its engine holds a version, with verified digest."""

    policy_version: int
    swap_pause_s: float
    fetched_bytes: int
    origin_bytes: int
    """The fetched bytes that did not come from a relay of the receiver's site."""


class WeightStore:
    """The versions of the current run; starts empty."""

    def __init__(self, *, max_kept: int = MAX_KEPT_VERSIONS) -> None:
        self._max_kept = max_kept
        self._run_id = ""
        self._kept: OrderedDict[str, Published] = OrderedDict()
        self._deltas = PublishedDeltas()
        self._digests: OrderedDict[int, str] = OrderedDict()
        self._grown = asyncio.Event()
        self.holdings: OrderedDict[str, Holding] = OrderedDict()
        self.relays = SiteRelays()

    def reset(self, run_id: str) -> None:
        """Offer nothing until `run_id` publishes."""
        self._run_id = run_id
        self._kept.clear()
        self._deltas.clear()
        self._digests.clear()
        self.holdings.clear()
        self.relays.clear()

    def add(self, version: Published) -> None:
        """Offer a version as the newest; deletes the content of versions no longer kept."""
        manifest = version.manifest
        self._kept[version.path.name] = version
        self._kept.move_to_end(version.path.name)
        self._digests[manifest.policy_version] = manifest.digest
        self._digests.move_to_end(manifest.policy_version)
        self.relays.note_content(content_id(manifest), manifest.digest)
        while len(self._digests) > MAX_KNOWN_DIGESTS:
            self._digests.popitem(last=False)
        while len(self._kept) > self._max_kept:
            _, oldest = self._kept.popitem(last=False)
            oldest.path.unlink(missing_ok=True)
        self._grown.set()
        self._grown = asyncio.Event()

    def expect_delta(self, delta: ExpectedDelta) -> None:
        """A delta is being made; receivers that hold its base are notified."""
        self._deltas.expected = delta

    def end_delta(self, version: Published, delta: Published | None) -> bool:
        """The delta to `version` is made, and is offered; or there is none. Returns whether `version` is still kept.

        A delta to a version that is not is deleted: others followed, or another run.
        """
        is_kept = any(kept is version for kept in self._kept.values())
        self._deltas.expect_no_more(version.manifest)
        if delta is not None and is_kept:
            self.relays.note_content(content_id(delta.manifest), delta.manifest.digest)
            self._deltas.add(delta, full_bytes=version.manifest.size_bytes)
        elif delta is not None:
            delta.path.unlink(missing_ok=True)
        return is_kept

    def expected_delta(
        self, full: weights_pb2.WeightsManifest, *, held_version: int, held_digest: str
    ) -> tuple[ExpectedDelta, int] | None:
        """As `PublishedDeltas.expected_chain`."""
        return self._deltas.expected_chain(full, held_version=held_version, held_digest=held_digest)

    def newest(self, run_id: str) -> Published:
        """The version published last; raises UnknownVersionError."""
        self.require_run(run_id)
        if not self._kept:
            raise UnknownVersionError(f"run {run_id} has published nothing yet", run_id=run_id)
        return next(reversed(self._kept.values()))

    def version(self, run_id: str, policy_version: int) -> Published:
        """A kept version, of the newest history that has it; raises UnknownVersionError."""
        self.require_run(run_id)
        for version in reversed(self._kept.values()):
            if version.manifest.policy_version == policy_version:
                return version
        raise UnknownVersionError(
            f"version {policy_version} of run {run_id} was never published or is no longer kept; ask for the newest",
            policy_version=policy_version,
        )

    def content(self, run_id: str, name: str) -> Path | None:
        """Path of the content of that name; None if it is not offered."""
        return next((each.path for each in self._offered(run_id) if each.path.name == name), None)

    def find_content(self, run_id: str, wanted_id: str) -> Path | None:
        """Path of the content with that id; None if it is not offered."""
        return next((each.path for each in self._offered(run_id) if content_id(each.manifest) == wanted_id), None)

    def _offered(self, run_id: str) -> list[Published]:
        return [*reversed(self._kept.values()), *self._deltas] if run_id == self._run_id else []

    def offer(
        self, run_id: str, policy_version: int | None, *, held_version: int, held_digest: str
    ) -> list[weights_pb2.WeightsManifest]:
        """The content that takes a receiver from what it holds to a version (the newest if None) in the fewest bytes.

        Returns:
            Deltas to apply in order, or the full manifest alone.

        Raises:
            UnknownVersionError: The version is not kept.
        """
        version = self.newest(run_id) if policy_version is None else self.version(run_id, policy_version)
        chain = self._deltas.chain(version.manifest, held_version=held_version, held_digest=held_digest)
        return chain or [version.manifest]

    async def wait_for_newer(self, seen: weights_pb2.WeightsManifest | None, *, timeout_s: float) -> bool:
        """Whether the newest version is another than `seen`, waiting up to `timeout_s` for that."""
        grown = self._grown
        if self._kept and next(reversed(self._kept.values())).manifest is not seen:
            return True
        return await set_within(grown, timeout_s)

    def record_holding(self, run_id: str, receiver_id: str, holding: Holding, *, digest: str) -> None:
        """A receiver holds a version; raises UnknownVersionError, DigestMismatchError."""
        self.require_run(run_id)
        published = self._digests.get(holding.policy_version)
        if published is None:
            raise UnknownVersionError(
                f"version {holding.policy_version} of run {run_id} is not known here",
                policy_version=holding.policy_version,
            )
        if digest != published:
            _log.error(
                "refused weights", receiver=receiver_id[:64], policy_version=holding.policy_version, digest=digest[:64]
            )
            raise DigestMismatchError(
                f"version {holding.policy_version} has digest {published}, {receiver_id} holds {digest:.64}; "
                "do not serve it, fetch it again",
                policy_version=holding.policy_version,
            )
        self.holdings[receiver_id] = holding
        self.holdings.move_to_end(receiver_id)
        while len(self.holdings) > MAX_HOLDINGS:
            self.holdings.popitem(last=False)

    def require_run(self, run_id: str) -> None:
        """Raises UnknownVersionError unless this is the current run."""
        if not run_id or run_id != self._run_id:
            raise UnknownVersionError(f"no weights of run {run_id!r:.80} here", run_id=run_id)


class WeightStoreService(weights_pb2_grpc.WeightStoreServiceServicer):
    """Offers a WeightStore over gRPC.

    Args:
        store: The published versions.
        broadcasts: Offered as well, if given.
        own_addresses: Checks that relays are at addresses of the receivers that register them.
    """

    def __init__(
        self, store: WeightStore, *, broadcasts: Broadcasts | None = None, own_addresses: OwnAddresses | None = None
    ) -> None:
        self.stopping = asyncio.Event()
        """Set when the server drains; replaced by the server's own event once that is built."""
        self.failures = SourceFailures()
        """Addresses that receivers cannot fetch from."""
        self._store = store
        self._broadcasts = broadcasts
        self._own_addresses = own_addresses or OwnAddresses(setting=TRUSTED_SETTING)

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights_pb2.GetManifestResponse:
        """The manifest of one version, or of the newest; of a delta if the caller reports what it holds."""
        policy_version = request.policy_version if request.HasField("policy_version") else None
        held_digest = request.held_digest if request.HasField("held_version") else ""
        *preceding, last = self._store.offer(
            request.run_id, policy_version, held_version=request.held_version, held_digest=held_digest
        )
        response = weights_pb2.GetManifestResponse(manifest=last, preceding=preceding)
        for manifest in response.preceding:
            del manifest.tensors[:]
        expected = self._store.expected_delta(last, held_version=request.held_version, held_digest=held_digest)
        if expected is not None:
            delta, response.delta_expected_bytes = expected
            response.delta_expected_after.CopyFrom(duration(delta.left_s))
        return response

    async def WatchManifests(
        self, request: weights_pb2.WatchManifestsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[weights_pb2.WatchManifestsResponse]:
        """Manifests as they are published; one that was replaced before it was sent is skipped."""
        seen: weights_pb2.WeightsManifest | None = None
        with self._attended_by(request):
            while not self.stopping.is_set():
                if await self._store.wait_for_newer(seen, timeout_s=WATCH_POLL_S):
                    seen = self._store.newest(request.run_id).manifest
                    yield weights_pb2.WatchManifestsResponse(manifest=seen)
        raise ServiceUnavailableError("the weight store is draining; reconnect")

    async def FindSources(
        self, request: weights_pb2.FindSourcesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights_pb2.FindSourcesResponse:
        """Where the receiver fetches a content from: a relay of its site, or the manifest's urls."""
        self._store.require_run(request.run_id)
        _check_receiver(request.receiver_id)
        _check_content_id(request.content_id)
        _check_length("site", request.site, MAX_NAME_CHARACTERS)
        _check_length("failed_url", request.failed_url, MAX_URL_CHARACTERS)
        _check_length("failure", request.failure, MAX_FAILURE_CHARACTERS)
        if request.relay_url:
            await self._check_relay(request, context)
        if request.failed_url and request.failure:
            self.failures.note(request.receiver_id, request.failed_url, request.failure)
        relay_urls = self._store.relays.sources(
            site=request.site,
            content_id=request.content_id,
            receiver_id=request.receiver_id,
            relay_url=request.relay_url,
            failed_url=request.failed_url,
        )
        response = weights_pb2.FindSourcesResponse(relay_urls=relay_urls)
        if request.agrees:
            response.agreed_content_id = self._store.relays.agreed(site=request.site, content_id=request.content_id)
        return response

    async def _check_relay(
        self, request: weights_pb2.FindSourcesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        try:
            await self._own_addresses.check("relay_url", request.relay_url, Peer.of(context))
        except InvalidFieldError as error:
            self.failures.note(request.receiver_id, request.relay_url, f"its relay is refused: {error}")
            raise

    async def JoinBroadcast(
        self, request: weights_pb2.JoinBroadcastRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights_pb2.JoinBroadcastResponse:
        """A place in the next broadcast of a content, once it begins."""
        self._store.require_run(request.run_id)
        _check_receiver(request.receiver_id)
        _check_content_id(request.content_id)
        if self._broadcasts is None:
            raise NotOfferedError("this weight store broadcasts nothing; fetch the content")
        return await self._broadcasts.join(request)

    async def ReportHolding(
        self, request: weights_pb2.ReportHoldingRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights_pb2.ReportHoldingResponse:
        """Check and record the version that a receiver holds."""
        _check_receiver(request.receiver_id)
        if request.relay_url:
            # Not sent to receivers; relays are found by FindSources.
            check_url("relay_url", request.relay_url)
        holding = Holding(
            policy_version=request.policy_version,
            swap_pause_s=request.swap_pause_s,
            fetched_bytes=request.fetched_bytes,
            origin_bytes=request.origin_bytes,
        )
        self._store.record_holding(request.run_id, request.receiver_id, holding, digest=request.digest)
        newest = self._store.newest(request.run_id).manifest
        return weights_pb2.ReportHoldingResponse(newest_version=newest.policy_version)

    def _attended_by(self, request: weights_pb2.WatchManifestsRequest) -> AbstractContextManager[None]:
        if self._broadcasts is None or not request.joins_broadcasts:
            return nullcontext()
        _check_receiver(request.receiver_id)
        return self._broadcasts.attended_by(request.receiver_id)


def _check_receiver(receiver_id: str) -> None:
    if not 1 <= len(receiver_id) <= MAX_NAME_CHARACTERS:
        raise InvalidFieldError(f"receiver_id: must have 1 to {MAX_NAME_CHARACTERS} characters", field="receiver_id")


def _check_length(field: str, value: str, most: int) -> None:
    if len(value) > most:
        raise InvalidFieldError(f"{field}: must have at most {most} characters", field=field)


def _check_content_id(content: str) -> None:
    if len(content) != 64 or not set(content) <= set("0123456789abcdef"):
        raise InvalidFieldError("content_id: must be a SHA-256, 64 hex digits", field="content_id")
