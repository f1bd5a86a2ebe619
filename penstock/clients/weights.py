"""Implements a receiver's side of the weight store: which versions exist, their digests, and which relays have them.

A manifest comes from the network: `check_manifest` verifies its digest and the limits below before anything in it is
used. The content is fetched by `penstock.downloads.downloader`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import grpc

from penstock.clients.streams import PERMANENT_ERRORS, Reconnecting
from penstock.errors import (
    DigestMismatchError,
    InvalidFieldError,
    NotOfferedError,
    PenstockError,
    UnknownVersionError,
    require,
)
from penstock.model.adapter_layout import adapter_of
from penstock.model.digests import manifest_digest
from penstock.network.connection import Connection
from penstock.network.rpc import DEFAULT_TIMEOUT_S, call, call_with_retry
from penstock.process.logger import get_logger
from penstock.security import NO_SECURITY, Security
from penstock.security.registered_addresses import check_url
from penstock.transfer.chunks import MAX_CHUNK_BYTES, chunk_digest
from penstock.v1 import weights_pb2, weights_pb2_grpc

MAX_CONTENT_BYTES = 4 * 1024**4
MAX_URLS = 64
MAX_FAILURE_CHARACTERS = 1024
MAX_CHAIN = 64
"""Most deltas in one offer."""
REPORT_PATIENCE_S = 20.0
JOIN_TIMEOUT_S = 20.0
"""Longest wait for a broadcast to begin."""

_FULL = (weights_pb2.WEIGHTS_KIND_FULL, weights_pb2.WEIGHTS_ENCODING_SAFETENSORS)
_ADAPTER = (weights_pb2.WEIGHTS_KIND_ADAPTER, weights_pb2.WEIGHTS_ENCODING_SAFETENSORS)
_DELTA = (weights_pb2.WEIGHTS_KIND_DELTA, weights_pb2.WEIGHTS_ENCODING_CHANGED_BLOCKS)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_log = get_logger()


class VersionName(NamedTuple):
    """A version, unambiguously: numbers repeat after a rewind, digests do not."""

    policy_version: int
    digest: str
    """Manifest digest, hex."""


class OfferedDeltas(NamedTuple):
    """What a weight store has for a receiver that holds a version: deltas, an expectation of some, or neither."""

    chain: tuple[weights_pb2.WeightsManifest, ...] = ()
    """To be applied in order; empty if none are offered yet, or will be."""
    expected_after_s: float | None = None
    """When to ask again, seconds from now; None if nothing is expected."""
    num_bytes: int = 0
    """Of the deltas offered or expected, together; 0 if that is not known."""


def content_id(manifest: weights_pb2.WeightsManifest) -> str:
    """The id of a content: SHA-256, hex, of its chunks' digests, each followed by a line feed."""
    return hashlib.sha256("".join(f"{chunk_digest(chunk)}\n" for chunk in manifest.chunks).encode()).hexdigest()


def check_manifest(manifest: weights_pb2.WeightsManifest, *, run_id: str) -> None:
    """Refuse a manifest that cannot be fetched or verified: of a full version, an adapter, or a delta with its result.

    Raises:
        InvalidFieldError: A field is missing, out of bounds, or of another run.
        NotOfferedError: A kind or encoding this client does not know.
        DigestMismatchError: The tensors do not have the digest stated in the manifest.
    """
    _check_content(manifest, run_id=run_id)
    names = [info.name for info in manifest.tensors]
    is_sorted = all(first < second for first, second in pairwise(names))
    require(
        bool(names) and is_sorted, "manifest.tensors", f"{len(names)} tensors", "one or more, sorted by name, unique"
    )
    algorithms = {(bool(info.blake3), bool(info.sha256)) for info in manifest.tensors}
    has_one_each = algorithms in ({(True, False)}, {(False, True)})
    require(has_one_each, "manifest.tensors", "several digests, or none", "one digest each, all of one algorithm")
    digest = manifest_digest(manifest.tensors)
    if digest != manifest.digest:
        raise DigestMismatchError(
            f"the tensors of version {manifest.policy_version} have digest {digest}, "
            f"the manifest states {manifest.digest}"
        )


def check_chain(chain: Sequence[weights_pb2.WeightsManifest], *, run_id: str, held: VersionName) -> None:
    """Refuse deltas that do not lead, one after another, from the loaded version to the last one's result.

    Raises:
        InvalidFieldError: As `check_manifest`; the ends of two deltas do not meet; more than MAX_CHAIN of them.
        NotOfferedError, DigestMismatchError: As `check_manifest`.
    """
    require(len(chain) <= MAX_CHAIN, "preceding", f"{len(chain)} deltas", f"at most {MAX_CHAIN}")
    for delta in chain[:-1]:
        _check_content(delta, run_id=run_id)
    check_manifest(chain[-1], run_id=run_id)
    for delta in chain:
        is_next = (delta.kind, delta.encoding) == _DELTA and (delta.base_version, delta.base_digest) == held
        require(is_next, "manifest.base_version", delta.base_version, f"version {held.policy_version}, which is loaded")
        held = VersionName(delta.policy_version, delta.digest)


def _check_content(manifest: weights_pb2.WeightsManifest, *, run_id: str) -> None:
    require(manifest.run_id == run_id, "manifest.run_id", manifest.run_id, repr(run_id))
    for field in ("digest", "base_digest"):
        # It is used as a file name.
        digest = getattr(manifest, field)
        is_digest = _DIGEST.fullmatch(digest) is not None or (field == "base_digest" and not digest)
        require(is_digest, f"manifest.{field}", digest[:80], "a SHA-256, 64 hex digits")
    require(manifest.policy_version >= 0, "manifest.policy_version", manifest.policy_version, "at least 0")
    if (manifest.kind, manifest.encoding) not in (_FULL, _ADAPTER, _DELTA):
        raise NotOfferedError(
            f"weights of kind {manifest.kind} in encoding {manifest.encoding} are not understood; "
            "only full ones and adapters as safetensors and deltas as changed blocks are"
        )
    _check_adapter(manifest)
    _check_chunks(manifest)
    require(1 <= len(manifest.urls) <= MAX_URLS, "manifest.urls", len(manifest.urls), f"1 to {MAX_URLS} addresses")
    for url in manifest.urls:
        check_url("manifest.urls", url, allows_query=True)


def _is_url(url: str) -> bool:
    try:
        check_url("relay_urls", url)
    except InvalidFieldError:
        return False
    return True


def _check_adapter(manifest: weights_pb2.WeightsManifest) -> None:
    is_set, kind = adapter_of(manifest) is not None, manifest.kind
    is_right = kind == weights_pb2.WEIGHTS_KIND_DELTA or is_set == (kind == weights_pb2.WEIGHTS_KIND_ADAPTER)
    require(is_right, "manifest.adapter", "set" if is_set else "unset", f"set for an adapter only; the kind is {kind}")


def _require_whole(manifest: weights_pb2.WeightsManifest) -> None:
    if manifest.kind == weights_pb2.WEIGHTS_KIND_DELTA:
        raise NotOfferedError(f"version {manifest.policy_version} is a delta, which was not requested")


def _check_chunks(manifest: weights_pb2.WeightsManifest) -> None:
    end = 0
    for chunk in manifest.chunks:
        where = f"{chunk.size_bytes} bytes at {chunk.offset}"
        is_next = chunk.offset == end and 1 <= chunk.size_bytes <= MAX_CHUNK_BYTES
        require(is_next, "manifest.chunks", where, f"1 to {MAX_CHUNK_BYTES} bytes at {end}")
        require(bool(chunk.blake3) != bool(chunk.sha256), "manifest.chunks", where, "with one digest")
        end += chunk.size_bytes
    is_whole = end == manifest.size_bytes and 1 <= end <= MAX_CONTENT_BYTES
    expected = f"{end}, as the chunks have, and 1 to {MAX_CONTENT_BYTES}"
    require(is_whole, "manifest.size_bytes", manifest.size_bytes, expected)


class WeightsClient(Connection):
    """Client of a weight store, for one receiver of one run."""

    def __init__(
        self,
        target: str | grpc.aio.Channel,
        *,
        run_id: str,
        receiver_id: str,
        site: str = "",
        security: Security = NO_SECURITY,
    ) -> None:
        super().__init__(target, security=security, service="weight store")
        self._stub = weights_pb2_grpc.WeightStoreServiceStub(self.channel)
        self._run_id = run_id
        self._receiver_id = receiver_id
        self._site = site
        self._is_relay_refused = False
        self.joins_broadcasts = False
        """Whether the store waits for this receiver before it broadcasts; set before `watch`."""

    async def get_manifest(self, policy_version: int | None = None) -> weights_pb2.WeightsManifest:
        """The checked manifest of a version (None: the newest) that needs no other one. Raises PenstockError."""
        request = weights_pb2.GetManifestRequest(run_id=self._run_id, policy_version=policy_version)
        response = await call(self._stub.GetManifest, request, peer=self.peer)
        check_manifest(response.manifest, run_id=self._run_id)
        _require_whole(response.manifest)
        if policy_version is not None and response.manifest.policy_version != policy_version:
            raise UnknownVersionError(f"{self.peer}: asked for {policy_version}, got another version")
        return response.manifest

    async def get_deltas(
        self, policy_version: int | None, *, held: VersionName, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> OfferedDeltas:
        """The checked deltas that lead from `held` to a version (None: the newest), or when they are expected.

        Raises PenstockError.
        """
        request = weights_pb2.GetManifestRequest(
            run_id=self._run_id,
            policy_version=policy_version,
            held_version=held.policy_version,
            held_digest=held.digest,
        )
        response = await call(self._stub.GetManifest, request, peer=self.peer, timeout_s=timeout_s)
        if response.manifest.kind == weights_pb2.WEIGHTS_KIND_DELTA:
            chain = (*response.preceding, response.manifest)
            check_chain(chain, run_id=self._run_id, held=held)
            return OfferedDeltas(chain=chain, num_bytes=sum(manifest.size_bytes for manifest in chain))
        if not response.HasField("delta_expected_after"):
            return OfferedDeltas()
        after_s = max(0.0, response.delta_expected_after.ToMicroseconds() / 1e6)
        return OfferedDeltas(expected_after_s=after_s, num_bytes=min(response.delta_expected_bytes, MAX_CONTENT_BYTES))

    async def watch(
        self, on_manifest: Callable[[weights_pb2.WeightsManifest], None], on_refused: Callable[[PenstockError], None]
    ) -> None:
        """Pass every manifest to `on_manifest` as it is published, until cancelled; reconnects by itself.

        A manifest that fails its check goes to `on_refused` instead. Raises PenstockError if a retry cannot help.
        """
        request = weights_pb2.WatchManifestsRequest(
            run_id=self._run_id,
            receiver_id=self._receiver_id,
            site=self._site,
            joins_broadcasts=self.joins_broadcasts,
        )
        stream = Reconnecting(self.peer)

        def take(response: weights_pb2.WatchManifestsResponse) -> None:
            try:
                check_manifest(response.manifest, run_id=self._run_id)
                _require_whole(response.manifest)
            except PenstockError as refusal:
                on_refused(refusal)
            else:
                on_manifest(response.manifest)

        def on_end(error: PenstockError | None) -> None:
            if isinstance(error, PERMANENT_ERRORS):
                raise error
            if error is not None and stream.is_news:
                _log.info("no answer from the weight store yet; trying again", error=str(error))

        # No deadline: nothing is sent between two versions. A dead peer is found by the channel's keepalive.
        await stream.run(lambda: stream.listen(self._stub.WatchManifests(request), take), on_end)

    async def find_relays(self, content: str, relay_url: str = "", failed_url: str = "") -> Sequence[str]:
        """Addresses of a content at relays of the receiver's site, best first; if none, it is fetched from the origin.

        Args:
            content: As `content_id` names it.
            relay_url: Address at which the receiver will serve it to others; empty if it will not.
            failed_url: An address returned before from which the fetch failed.
        """
        if not self._site:
            return ()
        request = self._sources_request(content)
        request.relay_url, request.failed_url = relay_url, failed_url
        try:
            response = await call(self._stub.FindSources, request, peer=self.peer)
        except PenstockError as error:
            if isinstance(error, InvalidFieldError) and relay_url:
                self._note_refused_relay(error)
                return await self.find_relays(content, "", failed_url)
            _log.info("the weight store names no relay; fetching from the origin", error=str(error))
            return ()
        return [url for url in response.relay_urls[:MAX_URLS] if _is_url(url)]

    async def agreed_content(self, content: str) -> str:
        """By which content the receiver's site takes a version: `content`, unless another of it was named there before.

        Args:
            content: Full, or the last delta to that version; as `content_id` names it.
        """
        if not self._site:
            return content
        request = self._sources_request(content)
        request.agrees = True
        try:
            response = await call(self._stub.FindSources, request, peer=self.peer)
        except PenstockError as error:
            _log.info("the weight store does not say what the site takes", error=str(error))
            return content
        # Empty from a store that does not know the question.
        return response.agreed_content_id or content

    async def report_failure(self, url: str, failure: str) -> None:
        """Report a faulty address, which an operator must mend, to the store; no error if that is away.

        Args:
            url: The address from which the fetch failed.
            failure: The problem, for display.
        """
        request = self._sources_request(hashlib.sha256(b"").hexdigest())
        request.failed_url, request.failure = url, failure[:MAX_FAILURE_CHARACTERS]
        try:
            await call(self._stub.FindSources, request, peer=self.peer)
        except PenstockError as error:
            _log.debug("a failure was not reported to the weight store", error=str(error))

    def _sources_request(self, content: str) -> weights_pb2.FindSourcesRequest:
        return weights_pb2.FindSourcesRequest(
            run_id=self._run_id, receiver_id=self._receiver_id, site=self._site, content_id=content
        )

    def _note_refused_relay(self, error: InvalidFieldError) -> None:
        # The address differs for every content; its host does not.
        if not self._is_relay_refused:
            _log.error("this generator relays nothing: the weight store refuses its relay's address", error=str(error))
        self._is_relay_refused = True

    async def join_broadcast(
        self, content: str, *, backend: weights_pb2.BroadcastBackend.ValueType, open_group_id: str
    ) -> weights_pb2.JoinBroadcastResponse:
        """Wait for a place in the next broadcast of a content; not checked. Raises PenstockError if there is none.

        Args:
            content: As `content_id` names it.
            backend: The library to use.
            open_group_id: The group whose connections are still open; empty if none.
        """
        request = weights_pb2.JoinBroadcastRequest(
            run_id=self._run_id,
            receiver_id=self._receiver_id,
            content_id=content,
            backend=backend,
            open_group_id=open_group_id,
        )
        return await call(self._stub.JoinBroadcast, request, peer=self.peer, timeout_s=JOIN_TIMEOUT_S)

    async def report_holding(
        self, *, policy_version: int, digest: str, swap_pause_s: float, fetched_bytes: int, origin_bytes: int = 0
    ) -> int:
        """Report the loaded version; returns the newest one. Raises DigestMismatchError if it must not be served."""
        request = weights_pb2.ReportHoldingRequest(
            run_id=self._run_id,
            receiver_id=self._receiver_id,
            policy_version=policy_version,
            digest=digest,
            swap_pause_s=swap_pause_s,
            fetched_bytes=fetched_bytes,
            origin_bytes=origin_bytes,
        )
        response = await call_with_retry(
            self._stub.ReportHolding, request, peer=self.peer, give_up_after_s=REPORT_PATIENCE_S
        )
        return int(response.newest_version)
