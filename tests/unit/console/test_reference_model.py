"""The model of scorers is checked before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from console.config.config import parse_run_config
from console.run.model_check import reference_problems


def write_model(path: Path, vocabulary: dict[str, int]) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return path


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(write_model(tmp_path / "student", {"a": 0}))},
        "data": {"train": "t"},
        "algorithm": {"kl_coefficient": 1.0, "reference": "service", "reference_path": str(tmp_path / "teacher")},
    }


def problems(document: dict[str, Any], **changes: Any) -> list[str]:
    return reference_problems(parse_run_config(document | changes, source="c.yaml"))


def test_a_teacher_of_the_same_vocabulary_is_taken(document, tmp_path):
    write_model(tmp_path / "teacher", {"a": 0})
    assert problems(document) == []


def test_a_missing_teacher_and_one_of_another_vocabulary_are_refused(document, tmp_path):
    assert problems(document) == [f"algorithm.reference_path: {tmp_path / 'teacher'}: no such directory"]
    assert problems(document, scorers=0) == [], "it is on the scorers' machine"
    write_model(tmp_path / "teacher", {"b": 0})
    [problem] = problems(document)
    assert "another vocabulary than that of model.path" in problem
