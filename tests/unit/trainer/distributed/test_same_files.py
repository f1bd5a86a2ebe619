"""Processes on several machines: whether they have one run folder and equal models."""

import shutil

import pytest

from penstock.config import ConfigError
from penstock.storage.addresses import checked_address
from penstock.storage.fetched import forget_copies
from services.trainer.folders.same_files import away_from, difference, fingerprint_of, mark_in


@pytest.fixture
def model(tmp_path):
    """A model's folder; nothing of it is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3 * 1024**2))
    return folder


def test_a_folder_that_is_not_shared_is_named_and_the_mark_does_not_stay(tmp_path):
    here, there = tmp_path / "here" / "run", tmp_path / "there" / "run"
    here.mkdir(parents=True)
    there.mkdir(parents=True)
    with mark_in(here) as mark:
        assert away_from(mark) is None
        found = away_from(there / mark.name)
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
    assert difference(model, fingerprint_of(model)) is None
    assert "is another than" in difference(other, fingerprint_of(model))
    assert "is none" in difference(tmp_path, fingerprint_of(model))


def test_a_stored_model_that_has_changed_meanwhile_is_named(tmp_path, model, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_copies()
    address = checked_address(f"file://{model}")
    fingerprint = fingerprint_of(address)
    assert difference(address, fingerprint) is None
    forget_copies()
    # In the middle, where no two folders on disks are compared.
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(3 * 1024**2 // 2)
        file.write(b"1")
    assert "it has changed meanwhile; start the run again" in difference(address, fingerprint)
    assert "there is no such object" in difference(checked_address(f"file://{tmp_path}/gone"), fingerprint)
