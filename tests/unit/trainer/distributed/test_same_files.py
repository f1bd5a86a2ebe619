"""Processes on several machines: whether they have one run folder and equal models."""

import shutil

import pytest

from penstock.config import ConfigError
from services.trainer.distributed.same_files import difference, fingerprint_of, mark_in


@pytest.fixture
def model(tmp_path):
    """A model's folder; nothing of it is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3 * 1024**2))
    return folder


def test_a_folder_that_is_not_shared_is_named_and_the_mark_does_not_stay(tmp_path, model):
    here, there = tmp_path / "here" / "run", tmp_path / "there" / "run"
    here.mkdir(parents=True)
    there.mkdir(parents=True)
    with mark_in(here) as mark:
        assert difference(mark, model, fingerprint_of(model)) is None
        found = difference(there / mark.name, model, fingerprint_of(model))
    assert found is not None
    assert str(there) in found
    assert "on a disk that they share" in found
    assert list(here.iterdir()) == []
    with pytest.raises(ConfigError, match="cannot be written to"), mark_in(tmp_path / "nowhere"):
        pass


@pytest.mark.parametrize("position", [0, 3 * 1024**2 - 1])
def test_another_model_of_the_same_shape_is_named(tmp_path, model, position):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    assert fingerprint_of(other) == fingerprint_of(model)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[position] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with mark_in(tmp_path) as mark:
        assert "is another than" in difference(mark, other, fingerprint_of(model))
        assert "is none" in difference(mark, tmp_path, fingerprint_of(model))
