"""Whether a file on this machine is the content that a manifest describes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from penstock.clients.weights import tensor_digests
from penstock.errors import DigestMismatchError
from penstock.v1 import weights_pb2
from penstock.weights import MalformedWeightsError, verify_safetensors


def verify_content(path: Path, manifest: weights_pb2.WeightsManifest) -> None:
    """Returns if the file is the manifest's content: a full one tensor by tensor, a delta chunk by chunk.

    What a delta makes of its base is proved when it is applied (`penstock.deltas`).

    Raises:
        DigestMismatchError: It is something else.
        OSError: It cannot be read.
    """
    try:
        if manifest.kind == weights_pb2.WEIGHTS_KIND_FULL:
            verify_safetensors(path, tensors=tensor_digests(manifest), digest=manifest.digest)
        else:
            _verify_chunks(path, manifest)
    except (DigestMismatchError, MalformedWeightsError) as error:
        raise DigestMismatchError(f"version {manifest.policy_version}: {error}") from error


def _verify_chunks(path: Path, manifest: weights_pb2.WeightsManifest) -> None:
    with path.open("rb") as file:
        for chunk in manifest.chunks:
            if hashlib.sha256(file.read(chunk.size_bytes)).hexdigest() != chunk.sha256:
                raise DigestMismatchError(f"{path.name}: the chunk at byte {chunk.offset} has another digest")
        if file.read(1):
            raise DigestMismatchError(f"{path.name}: longer than {manifest.size_bytes} bytes")
