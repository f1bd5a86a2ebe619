"""How contents are cut: every byte once, and few enough pieces for one message."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from blake3 import blake3

from penstock.clients.weights import MAX_CONTENT_BYTES, check_manifest
from penstock.model.digests import manifest_digest
from penstock.network.rpc import MAX_MESSAGE_BYTES
from penstock.transfer.chunks import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, chunk_bytes_for, chunks_of, is_chunk
from penstock.v1 import weights_pb2

GB, TB = 10**9, 10**12
SHA256, BLAKE3 = hashlib.sha256(b"").hexdigest(), blake3(b"").hexdigest()


def made_chunks(size_bytes: int) -> list[weights_pb2.ChunkInfo]:
    step = chunk_bytes_for(size_bytes)
    return [
        weights_pb2.ChunkInfo(offset=offset, size_bytes=min(step, size_bytes - offset), blake3=BLAKE3)
        for offset in range(0, size_bytes, step)
    ]


def made_manifest(size_bytes: int, *, num_tensors: int) -> weights_pb2.WeightsManifest:
    """As of a mixture of experts, each a tensor of its own."""
    share_bytes = size_bytes // num_tensors
    tensors = [
        weights_pb2.TensorInfo(
            name=f"model.layers.{number // 1200:02}.mlp.experts.{number % 1200:04}.down_proj.weight",
            dtype="BF16",
            shape=[2048, 7168],
            sha256=SHA256,
            size_bytes=share_bytes,
        )
        for number in range(num_tensors)
    ]
    manifest = weights_pb2.WeightsManifest(
        run_id="r",
        kind=weights_pb2.WEIGHTS_KIND_FULL,
        encoding=weights_pb2.WEIGHTS_ENCODING_SAFETENSORS,
        tensors=tensors,
        chunks=made_chunks(size_bytes),
        size_bytes=size_bytes,
        urls=["http://trainer:7305/weights/r/v1"],
    )
    manifest.digest = manifest_digest(manifest.tensors)
    return manifest


def test_chunks_cover_a_file_without_gaps(tmp_path: Path) -> None:
    path = tmp_path / "content"
    path.write_bytes(bytes(range(250)))
    chunks = chunks_of(path, chunk_bytes=100)
    assert [(chunk.offset, chunk.size_bytes) for chunk in chunks] == [(0, 100), (100, 100), (200, 50)]
    assert chunks[2].blake3 == blake3(bytes(range(200, 250))).hexdigest()
    path.write_bytes(bytes(MIN_CHUNK_BYTES + 1))
    assert [chunk.size_bytes for chunk in chunks_of(path)] == [MIN_CHUNK_BYTES, 1]


@pytest.mark.parametrize(
    "digest", [{"blake3": blake3(b"abcd").hexdigest()}, {"sha256": hashlib.sha256(b"abcd").hexdigest()}]
)
def test_a_chunk_is_proved_by_the_digest_it_states_in_however_many_pieces(digest: dict[str, str]) -> None:
    chunk = weights_pb2.ChunkInfo(size_bytes=4, **digest)
    assert is_chunk(chunk, b"abcd")
    assert is_chunk(chunk, memoryview(b"abcd"))
    assert not is_chunk(chunk, b"abce")
    assert not is_chunk(weights_pb2.ChunkInfo(size_bytes=4), b"abcd")


@pytest.mark.parametrize(
    ("size_bytes", "expected_mib"), [(1, 1), (4 * 2**30, 1), (4 * 2**30 + 1, 2), (14 * GB, 4), (2 * TB, 64)]
)
def test_chunks_grow_with_the_content_up_to_what_receivers_take(size_bytes: int, expected_mib: int) -> None:
    assert chunk_bytes_for(size_bytes) == expected_mib * 2**20
    assert chunk_bytes_for(MAX_CONTENT_BYTES) == MAX_CHUNK_BYTES


@pytest.mark.slow
def test_a_manifest_of_two_terabytes_fits_a_message_with_room_to_spare() -> None:
    manifest = made_manifest(2 * TB, num_tensors=70_000)
    check_manifest(manifest, run_id="r")
    assert manifest.ByteSize() < 0.8 * MAX_MESSAGE_BYTES
    del manifest.tensors[:]
    assert manifest.ByteSize() < 0.15 * MAX_MESSAGE_BYTES


def test_the_longest_chain_that_is_offered_takes_little_more_than_the_full_manifest() -> None:
    full_bytes = weights_pb2.WeightsManifest(chunks=made_chunks(2 * TB)).ByteSize()
    # Together the deltas of a chain have fewer bytes than the full content.
    delta = weights_pb2.WeightsManifest(chunks=made_chunks(2 * TB // 8 - 1))
    chain = weights_pb2.GetManifestResponse(manifest=delta, preceding=[delta] * 7)
    assert chain.ByteSize() < 1.1 * full_bytes
