"""A delta gives back every bit, costs little where little changed, and is refused when it is not what was written."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deltas import content
from penstock.deltas.blocks import Changes, Coding, MalformedDeltaError, Packed, Packing, apply_changes, changes_between
from penstock.deltas.content import apply_deltas, write_delta
from penstock.model.digests import WeightsMismatchError, manifest_digest, safetensors_digests

MIB = 1024 * 1024
_DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


@dataclass
class Version:
    path: Path
    digest: str


def write_version(path: Path, arrays: dict[str, np.ndarray], *, padding: int = 0) -> Version:
    """A safetensors file of raw bits; `padding` moves its data off the alignment."""
    header, offset = {}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _DTYPES[array.itemsize],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode() + b" " * padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays.values()))
    return Version(path, manifest_digest(safetensors_digests(path)))


def delta_between(base: Version, new: Version, target: Path, *, max_bytes: int = 2**40) -> int | None:
    return write_delta(base.path, new.path, target, base_digest=base.digest, digest=new.digest, max_bytes=max_bytes)


def apply(base: Version, deltas: list[Path], new: Version, target: Path) -> None:
    apply_deltas(
        base.path,
        deltas,
        target,
        base_digest=base.digest,
        tensors=safetensors_digests(new.path),
        digest=new.digest,
    )


@st.composite
def tensor_pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Old and new bits of one tensor: width, shape, how many elements change and by how much all vary."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 256, (*shape, width), dtype=np.uint8).view(f"<u{width}").reshape(shape)
    changed = rng.random(shape) < draw(st.sampled_from([0.0, 0.0005, 0.02, 0.2, 1.0]))
    bits = rng.integers(0, 1 + min(255, draw(st.sampled_from([1, 255]))), (*shape, width), dtype=np.uint8)
    return old, np.where(changed, old ^ bits.view(f"<u{width}").reshape(shape), old)


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(tensor_pairs(), min_size=1, max_size=4), block=st.sampled_from([64, 4096]), padding=st.integers(0, 7)
)
def test_any_change_of_any_tensors_comes_back_to_the_bit(pairs, block, padding) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        patch.setattr(content, "BLOCK_BYTES", block)
        old = write_version(folder / "old", {f"t{i}": pair[0] for i, pair in enumerate(pairs)}, padding=padding)
        new = write_version(folder / "new", {f"t{i}": pair[1] for i, pair in reversed(list(enumerate(pairs)))})
        size_bytes = delta_between(old, new, folder / "delta")
        assert size_bytes == (folder / "delta").stat().st_size
        apply(old, [folder / "delta"], new, folder / "made")
        assert safetensors_digests(folder / "made") == safetensors_digests(new.path)
        assert sorted(os.listdir(folder)) == ["delta", "made", "new", "old"]


def test_nan_payloads_and_signed_zeros_survive() -> None:
    old = np.array([0.0, np.nan, 1.0, np.inf], "<f4").view("<u4")
    new = np.array([0x80000000, 0x7FC00001, 0xFFC00000, 0xFF800000], "<u4")
    changes = changes_between(old, new)
    assert changes is not None
    made = old.copy()
    apply_changes(changes, made)
    assert made.tobytes() == new.tobytes()


def _bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def test_two_percent_of_random_changes_in_bf16_cost_less_than_five_percent(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    old = _bf16(rng.standard_normal(4 * MIB) * 0.02)
    changed = rng.random(old.size) < 0.02
    new = old.copy()
    # All 16 bits at random: the worst case, of which training is far.
    new[changed] ^= rng.integers(1, 2**16, changed.sum(), dtype=np.uint16)
    size_bytes = delta_between(
        write_version(tmp_path / "old", {"a": old, "b": old}),
        write_version(tmp_path / "new", {"a": new, "b": old}),
        tmp_path / "delta",
    )
    assert size_bytes is not None
    assert size_bytes <= 0.03 * old.nbytes  # of `a` alone: `b` did not change and costs nothing


@pytest.mark.parametrize(
    ("share", "coding"), [(0.00001, Coding.GAPS), (0.02, Coding.GAPS), (0.3, Coding.BITMAP), (1.0, Coding.EVERY)]
)
def test_positions_are_given_in_the_shortest_way(share: float, coding: Coding) -> None:
    rng = np.random.default_rng(2)
    old = rng.integers(0, 2**16, MIB, dtype=np.uint16)
    new = np.where(rng.random(MIB) < share, ~old, old)
    changes = changes_between(old, new)
    assert changes is not None
    assert changes.coding is coding
    made = old.copy()
    apply_changes(changes, made)
    assert (made == new).all()


def test_a_delta_that_would_be_too_large_is_not_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    old, new = (rng.integers(0, 2**16, MIB, dtype=np.uint16) for _ in range(2))
    versions = write_version(tmp_path / "old", {"a": old}), write_version(tmp_path / "new", {"a": new})
    assert delta_between(*versions, tmp_path / "delta", max_bytes=MIB) is None
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


@pytest.mark.parametrize("other", [{"a": np.zeros(5, "<u2")}, {"a": np.zeros(4, "<u4")}, {"b": np.zeros(4, "<u2")}, {}])
def test_other_tensors_have_no_delta(tmp_path: Path, other: dict[str, np.ndarray]) -> None:
    old = write_version(tmp_path / "old", {"a": np.zeros(4, "<u2")})
    assert delta_between(old, write_version(tmp_path / "new", other), tmp_path / "delta") is None


@pytest.fixture
def chain(tmp_path: Path) -> tuple[list[Version], list[Path]]:
    """Three versions of a few small tensors, and the two deltas between them."""
    rng = np.random.default_rng(4)
    arrays = {"a": rng.integers(0, 2**16, (30, 10), dtype=np.uint16), "b": rng.integers(0, 2**32, 50, dtype=np.uint32)}
    versions = []
    for number in range(3):
        versions.append(write_version(tmp_path / f"v{number}", arrays))
        arrays = {name: np.where(rng.random(array.shape) < 0.3, array + 1, array) for name, array in arrays.items()}
        arrays = {name: array.astype(f"<u{array.itemsize}") for name, array in arrays.items()}
    deltas = [tmp_path / "d1", tmp_path / "d2"]
    for before, after, delta in zip(versions, versions[1:], deltas, strict=False):
        assert delta_between(before, after, delta) is not None
    return versions, deltas


def test_a_chain_of_deltas_gives_the_last_version(tmp_path: Path, chain) -> None:
    versions, deltas = chain
    apply(versions[0], deltas, versions[2], tmp_path / "made")
    assert safetensors_digests(tmp_path / "made") == safetensors_digests(versions[2].path)


@pytest.mark.parametrize(("base", "numbers"), [(1, [0, 1]), (0, [1]), (0, [1, 0]), (0, [0]), (0, [0, 1, 1])])
def test_a_chain_whose_ends_do_not_meet_is_refused(tmp_path: Path, chain, base: int, numbers: list[int]) -> None:
    versions, deltas = chain
    with pytest.raises(WeightsMismatchError, match="do not meet"):
        apply(versions[base], [deltas[number] for number in numbers], versions[2], tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_every_flipped_byte_of_a_delta_is_refused(tmp_path: Path, chain) -> None:
    versions, deltas = chain
    right = deltas[0].read_bytes()
    for offset in range(len(right)):
        deltas[0].write_bytes(right[:offset] + bytes([right[offset] ^ 0x40]) + right[offset + 1 :])
        with pytest.raises((MalformedDeltaError, WeightsMismatchError)):
            apply(versions[0], deltas[:1], versions[1], tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_every_truncated_delta_is_refused(tmp_path: Path, chain) -> None:
    versions, deltas = chain
    right = deltas[0].read_bytes()
    for length in range(len(right)):
        deltas[0].write_bytes(right[:length])
        with pytest.raises(MalformedDeltaError):
            apply(versions[0], deltas[:1], versions[1], tmp_path / "made")


def test_a_base_that_is_not_what_it_was_when_it_was_digested_is_refused(tmp_path: Path, chain) -> None:
    versions, deltas = chain
    data = bytearray(versions[0].path.read_bytes())
    data[-1] ^= 1
    versions[0].path.write_bytes(data)
    with pytest.raises(WeightsMismatchError):
        apply(versions[0], deltas[:1], versions[1], tmp_path / "made")
    assert sorted(os.listdir(tmp_path)) == ["d1", "d2", "v0", "v1", "v2"]


def _resealed(path: Path, **at: int) -> None:
    """Change fields of the first block's header and make the delta's own digest right again."""
    import hashlib

    data = bytearray(path.read_bytes()[:-32])
    fields = list(content._BLOCK.unpack_from(data, content._HEADER_BYTES))
    names = ["number", "block", "coding", "p_packing", "p_plain", "p_stored", "v_packing", "v_plain", "v_stored"]
    for name, value in at.items():
        fields[names.index(name)] = value
    content._BLOCK.pack_into(data, content._HEADER_BYTES, *fields)
    path.write_bytes(data + hashlib.sha256(data).digest())


@pytest.mark.parametrize(
    "field",
    [
        {"number": 2},
        {"block": 1},
        {"block": 2**32 - 1},
        {"coding": 0},
        {"coding": 3},
        {"p_packing": 7},
        {"p_plain": 2**32 - 1},
        {"p_stored": 2**32 - 1},
        {"v_packing": 0},
        {"v_plain": 2**32 - 1},
        {"v_stored": 0},
    ],
    ids=str,
)
def test_a_sealed_delta_that_lies_is_refused(tmp_path: Path, chain, field: dict[str, int]) -> None:
    versions, deltas = chain
    _resealed(deltas[0], **field)
    with pytest.raises((MalformedDeltaError, WeightsMismatchError)):
        apply(versions[0], deltas[:1], versions[1], tmp_path / "made")


def test_a_zstd_frame_that_claims_to_be_huge_sets_nothing_aside() -> None:
    import zstandard

    # A frame header that states its size in 8 bytes, and one empty last block.
    liar = b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little") + b"\x01\x00\x00"
    honest = zstandard.ZstdCompressor().compress(bytes(2**20))
    for frame, stated in [(liar, 16), (honest, 16), (honest, 2**20)]:
        changes = Changes(Coding.EVERY, Packed(Packing.PLAIN, 0, b""), Packed(Packing.ZSTD, stated, frame))
        with pytest.raises(MalformedDeltaError):
            apply_changes(changes, np.zeros(8, "<u2"))


def test_blocks_out_of_order_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(content, "BLOCK_BYTES", 64)
    versions = [
        write_version(tmp_path / name, {"a": np.full(64, value, "<u2")}) for name, value in [("old", 1), ("new", 2)]
    ]
    delta = tmp_path / "delta"
    assert delta_between(*versions, delta) is not None
    apply(versions[0], [delta], versions[1], tmp_path / "made")
    _resealed(delta, block=1)
    with pytest.raises(MalformedDeltaError, match="out of order"):
        apply(versions[0], [delta], versions[1], tmp_path / "made2")


def test_memory_is_that_of_a_block_not_of_the_model(tmp_path: Path, monkeypatch) -> None:
    import tracemalloc

    monkeypatch.setattr(content, "BLOCK_BYTES", 64 * 1024)
    bits = np.arange(2 * MIB, dtype=np.uint16)
    old, new = write_version(tmp_path / "old", {"a": bits}), write_version(tmp_path / "new", {"a": bits ^ np.uint16(1)})
    tracemalloc.start()
    try:
        assert delta_between(old, new, tmp_path / "delta") is not None
        apply(old, [tmp_path / "delta"], new, tmp_path / "made")
        assert tracemalloc.get_traced_memory()[1] < 0.5 * bits.nbytes
    finally:
        tracemalloc.stop()
