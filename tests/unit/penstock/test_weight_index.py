"""Weights that are not all there, or an index that is wrong about them, are refused before a byte of them is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.model.weight_index import INDEX_FILE, check_index, check_weights

FILES = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, file in zip("ab", FILES, strict=True):
        save_file({name: np.zeros(3, np.float32)}, tmp_path / file)
    write(tmp_path, {"a": FILES[0], "b": FILES[1]})
    return tmp_path


def write(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def test_a_true_index_and_a_model_without_one_pass(folder: Path) -> None:
    check_index(folder)
    (folder / INDEX_FILE).unlink()
    check_index(folder)


def announce_a_gigabyte(folder: Path) -> None:
    path = folder / FILES[1]
    path.write_bytes((2**30).to_bytes(8, "little") + path.read_bytes()[8:])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / FILES[1]).unlink(), "model-2.safetensors, which it names, is missing"),
        (lambda folder: write(folder, {"a": FILES[1], "b": FILES[1]}), "weight_map.a: model-2.safetensors does not"),
        (lambda folder: write(folder, {"a": "../model-1.safetensors"}), "is no file of this folder"),
        (lambda folder: write(folder, {"a": "/etc/passwd"}), "is no file of this folder"),
        (lambda folder: write(folder, {"a": 3}), "weight_map.a: 3 is no file of this folder"),
        (lambda folder: write(folder, {}), "has no weight_map"),
        (lambda folder: write(folder, [FILES[0]]), "has no weight_map"),
        (announce_a_gigabyte, "its weights cannot be read"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(folder: Path, spoil: Callable[[Path], None], told: str) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        check_index(folder)
    assert "\n" not in str(caught.value)


def cut_short(folder: Path) -> None:
    path = folder / FILES[0]
    path.write_bytes(path.read_bytes()[:-4])


def remove(folder: Path) -> None:
    for name in FILES:
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (cut_short, "model-1.safetensors: tensor 'a': its bytes do not fit its shape or the file"),
        (remove, "holds no *.safetensors; copy the model's weights there"),
        (lambda folder: (folder / FILES[0]).write_bytes(b""), "model-1.safetensors: empty"),
    ],
)
def test_weights_that_are_not_all_there_are_named_in_one_line(
    folder: Path, spoil: Callable[[Path], None], told: str
) -> None:
    (folder / INDEX_FILE).unlink()
    check_weights(folder)
    spoil(folder)
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        check_weights(folder)
    assert "\n" not in str(caught.value)
