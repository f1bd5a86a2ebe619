"""What an adapter's manifest must state, which tensors follow from it, and the base it names."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.clients.weights import check_manifest
from penstock.errors import InvalidFieldError
from penstock.model.adapter_layout import (
    BaseMismatchError,
    adapter_layout,
    adapter_of,
    check_base,
    model_digest,
    scaling,
)
from penstock.model.digests import manifest_digest, safetensors_digests
from penstock.v1 import weights_pb2
from tests.helpers.weights.scripted_weight_store import make_manifest, write_weights

SPEC = weights_pb2.AdapterInfo(base_digest="ab" * 32, rank=4, alpha=8.0, target_modules=["down_proj", "q_proj"])


@pytest.fixture
def manifest(tmp_path):
    made = make_manifest(write_weights(tmp_path / "w", seed=1), policy_version=1, url="http://h/w")
    made.kind = weights_pb2.WEIGHTS_KIND_ADAPTER
    made.adapter.CopyFrom(SPEC)
    return made


def test_the_statement_survives_the_wire(manifest):
    check_manifest(manifest, run_id="r")
    assert adapter_of(weights_pb2.WeightsManifest.FromString(manifest.SerializeToString())) == SPEC
    assert scaling(SPEC) == 2.0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: setattr(m, "kind", weights_pb2.WEIGHTS_KIND_FULL),
        lambda m: m.ClearField("adapter"),
        lambda m: setattr(m.adapter, "base_digest", "AB" * 32),
        lambda m: setattr(m.adapter, "rank", 0),
        lambda m: setattr(m.adapter, "rank", 100_000),
        lambda m: setattr(m.adapter, "alpha", float("nan")),
        lambda m: setattr(m.adapter, "alpha", -1.0),
        lambda m: m.adapter.ClearField("target_modules"),
        lambda m: m.adapter.target_modules.append("../q_proj"),
        lambda m: m.adapter.target_modules.extend(["x"] * 300),
    ],
)
def test_a_statement_that_cannot_be_applied_is_refused(manifest, spoil):
    spoil(manifest)
    with pytest.raises(InvalidFieldError):
        check_manifest(manifest, run_id="r")


def test_its_tensors_follow_from_the_base_and_the_layers_it_names():
    base = {
        "model.layers.0.q_proj.weight": (6, 5),
        "model.layers.0.q_proj.bias": (6,),
        "model.layers.0.k_proj.weight": (6, 5),
        "model.layers.0.down_proj.weight": (5, 9),
        "model.q_proj_norm.weight": (5,),
    }
    assert adapter_layout(base, SPEC) == {
        "base_model.model.model.layers.0.q_proj.lora_A.weight": (4, 5),
        "base_model.model.model.layers.0.q_proj.lora_B.weight": (6, 4),
        "base_model.model.model.layers.0.down_proj.lora_A.weight": (4, 9),
        "base_model.model.model.layers.0.down_proj.lora_B.weight": (5, 4),
    }


def test_a_model_is_known_by_its_tensors_however_they_lie_in_files(tmp_path):
    whole, split = tmp_path / "whole", tmp_path / "split"
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, dtype=np.float32)
    for folder in (whole, split):
        folder.mkdir()
    save_file({"a": a, "b": b}, whole / "model.safetensors")
    save_file({"b": b}, split / "model-1.safetensors")
    save_file({"a": a}, split / "model-2.safetensors")
    assert (
        model_digest(whole)
        == model_digest(split)
        == manifest_digest(safetensors_digests(whole / "model.safetensors", "sha256"))
    )
    save_file({"a": a + 1, "b": b}, whole / "model.safetensors")
    assert model_digest(whole) != model_digest(split)
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        model_digest(tmp_path)


def test_another_base_is_refused_by_both_digests():
    check_base(SPEC, held_digest=SPEC.base_digest)
    with pytest.raises(BaseMismatchError) as refusal:
        check_base(weights_pb2.AdapterInfo(base_digest="cd" * 32), held_digest=SPEC.base_digest)
    assert "cd" * 32 in str(refusal.value)
    assert SPEC.base_digest in str(refusal.value)
