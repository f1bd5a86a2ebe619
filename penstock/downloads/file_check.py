"""Whether a file on this machine is the content that a manifest describes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.errors import DigestMismatchError
from penstock.model.digests import MalformedWeightsError, safetensors_places, verify_safetensors
from penstock.transfer.chunks import is_chunk
from penstock.v1 import weights_pb2


def verify_content(path: Path, manifest: weights_pb2.WeightsManifest) -> None:
    """Returns if the file is the manifest's content: a full one or an adapter tensor by tensor, a delta chunk by chunk.

    What a delta makes of its base is proved when it is applied (`penstock.deltas`).

    Raises:
        DigestMismatchError: It is something else.
        OSError: It cannot be read.
    """
    try:
        if manifest.kind != weights_pb2.WEIGHTS_KIND_DELTA:
            verify_safetensors(path, tensors=manifest.tensors, digest=manifest.digest)
        else:
            _verify_chunks(path, manifest.chunks)
            if path.stat().st_size != manifest.size_bytes:
                raise DigestMismatchError(f"{path.name}: not {manifest.size_bytes} bytes long")
    except (DigestMismatchError, MalformedWeightsError) as error:
        raise DigestMismatchError(f"version {manifest.policy_version}: {error}") from error


def is_laid_out_alike(path: Path, manifest: weights_pb2.WeightsManifest) -> bool:
    """Whether a file proved to hold a version is the manifest's content byte for byte, not only tensor by tensor.

    That follows from its size and the chunks its header lies in: the tensors are proved, and fill the rest.
    """
    places = safetensors_places(path) if manifest.kind != weights_pb2.WEIGHTS_KIND_DELTA else ()
    header_bytes = min((place.begin for place in places), default=manifest.size_bytes)
    filled_bytes = header_bytes + sum(place.end - place.begin for place in places)
    if path.stat().st_size != manifest.size_bytes or filled_bytes != manifest.size_bytes:
        return False
    chunks = [chunk for chunk in manifest.chunks if chunk.offset < header_bytes]
    try:
        _verify_chunks(path, chunks)
    except DigestMismatchError:
        return False
    return True


def _verify_chunks(path: Path, chunks: Iterable[weights_pb2.ChunkInfo]) -> None:
    with path.open("rb") as file:
        for chunk in chunks:
            if not is_chunk(chunk, file.read(chunk.size_bytes)):
                raise DigestMismatchError(f"{path.name}: the chunk at byte {chunk.offset} has another digest")
