"""Digests identify tensors, not files; headers are not trusted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from penstock.model.digests import (
    MalformedWeightsError,
    WeightsMismatchError,
    check_layout,
    manifest_digest,
    safetensors_digests,
    safetensors_shapes,
    tensor_digest,
    verify_safetensors,
)
from penstock.model.hashing import Algorithm
from penstock.v1.weights_pb2 import TensorInfo

ARRAYS = {"b": np.arange(6, dtype="<f4").reshape(2, 3), "a": np.array([1.5], "<f4")}


def write_safetensors(path: Path, arrays: dict[str, np.ndarray], **header: object) -> Path:
    offset = 0
    for name, array in arrays.items():
        entry = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        header.setdefault(name, entry)
        offset += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays.values()))
    return path


def digest_of(name: str, array: np.ndarray, algorithm: Algorithm = "blake3") -> TensorInfo:
    return tensor_digest(name=name, dtype="F32", shape=array.shape, data=array.tobytes(), algorithm=algorithm)


def test_a_tensor_digest_is_the_blake3_of_its_bytes_or_an_older_publishers_sha256() -> None:
    content = ARRAYS["b"].tobytes()
    kind = {"name": "b", "dtype": "F32", "shape": [2, 3], "size_bytes": 24}
    assert digest_of("b", ARRAYS["b"]) == TensorInfo(**kind, blake3=blake3(content).hexdigest())
    older = digest_of("b", ARRAYS["b"], "sha256")
    assert older == TensorInfo(**kind, sha256=hashlib.sha256(content).hexdigest())


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 8"):
        tensor_digest(name="a", dtype="F32", shape=(2,), data=b"123")
    with pytest.raises(ValueError, match="unknown element type"):
        tensor_digest(name="a", dtype="F3", shape=(2,), data=b"123")


def test_a_manifest_digest_is_over_documented_lines() -> None:
    a, b = digest_of("a", ARRAYS["a"]), digest_of("b", ARRAYS["b"])
    text = f"a\tF32\t1\t{a.blake3}\nb\tF32\t2x3\t{b.blake3}\n"
    assert manifest_digest([b, a]) == manifest_digest([a, b]) == hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(ValueError, match="two tensors"):
        manifest_digest([a, a])


def test_digests_do_not_depend_on_order_or_metadata_of_the_file(tmp_path: Path) -> None:
    one = write_safetensors(tmp_path / "one", ARRAYS)
    other = write_safetensors(tmp_path / "other", dict(reversed(ARRAYS.items())), __metadata__={"format": "pt"})
    assert one.read_bytes() != other.read_bytes()
    assert safetensors_digests(one) == safetensors_digests(other)
    assert safetensors_digests(one) == (digest_of("a", ARRAYS["a"]), digest_of("b", ARRAYS["b"]))
    assert safetensors_shapes(one) == {"a": (1,), "b": (2, 3)}


def test_digests_of_two_algorithms_equal_nothing(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "weights", ARRAYS)
    mixed = [digest_of("a", ARRAYS["a"], "sha256"), digest_of("b", ARRAYS["b"])]
    with pytest.raises(WeightsMismatchError, match=r"lists: b$"):
        verify_safetensors(path, tensors=mixed, digest=manifest_digest(mixed))


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_verification_names_what_differs(algorithm: Algorithm, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "weights", ARRAYS)
    tensors = safetensors_digests(path, algorithm)
    digest = manifest_digest(tensors)
    verify_safetensors(path, tensors=tensors, digest=digest)
    with pytest.raises(WeightsMismatchError, match="manifest states"):
        verify_safetensors(path, tensors=tensors, digest="0" * 64)
    write_safetensors(path, {**ARRAYS, "b": ARRAYS["b"] + 1})
    with pytest.raises(WeightsMismatchError) as caught:
        verify_safetensors(path, tensors=tensors, digest=digest)
    assert caught.value.metadata == {"tensors": "b"}


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [0, 1 << 64], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "S99", "shape": [1], "data_offsets": [0, 4]},
        [1, 2],
    ],
    ids=[
        "wrong size",
        "beyond the end",
        "negative",
        "no message's",
        "not a number",
        "one offset",
        "unknown type",
        "not a mapping",
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, entry: object) -> None:
    path = write_safetensors(tmp_path / "bad", ARRAYS, a=entry)
    with pytest.raises(MalformedWeightsError, match="'a'"):
        safetensors_digests(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        (2**40).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"{bad",
        (2).to_bytes(8, "little") + b"[]",
    ],
    ids=["empty", "short", "huge header", "not JSON", "not a mapping"],
)
def test_what_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(MalformedWeightsError):
        safetensors_digests(path)


@pytest.mark.parametrize("name", ["a\tF32\t1", "a\ud800"], ids=["forges a line of a manifest", "half a character"])
def test_an_unusable_tensor_name_is_refused(tmp_path: Path, name: str) -> None:
    path = write_safetensors(tmp_path / "bad", {name: ARRAYS["a"]})
    with pytest.raises(MalformedWeightsError, match="name"):
        safetensors_digests(path)


def test_a_layout_must_agree_but_for_optional_names() -> None:
    tensors = [digest_of(name, array) for name, array in ARRAYS.items()]
    check_layout({"a": (1,), "b": (2, 3)}, tensors)
    check_layout({"a": (1,), "b": (2, 3), "head": (4,)}, tensors, optional=["head"])
    check_layout({"a": (1,)}, tensors, optional=["b"])
    with pytest.raises(WeightsMismatchError, match="head"):
        check_layout({"a": (1,), "b": (2, 3), "head": (4,)}, tensors)
    with pytest.raises(WeightsMismatchError, match="b"):
        check_layout({"a": (1,), "b": (3, 2)}, tensors, optional=["b"])


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    shared = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
    path = write_safetensors(tmp_path / "bad", ARRAYS, a=shared)
    with pytest.raises(MalformedWeightsError, match="overlap"):
        safetensors_digests(path)
