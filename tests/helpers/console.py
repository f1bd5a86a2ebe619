"""What tests of the console share: a model directory that looks real, a small configuration, the command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from click.testing import Result
from typer.testing import CliRunner

from console.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-P", "-m", "console")


def write_model(directory: Path, *, max_context_tokens: int = 512) -> Path:
    """A directory with the files that a model's directory has; nothing in it can be loaded."""
    directory.mkdir(parents=True)
    config = {"model_type": "qwen2", "max_position_embeddings": max_context_tokens}
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"[UNK]": 95}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    """A JSONL file; two good rows when none are given."""
    chosen = rows or ({"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"})
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return path


def document(folder: Path) -> dict[str, Any]:
    """A configuration whose files exist; nothing is started for it by reading it."""
    return {
        "run": {"dir": str(folder / "runs"), "id": "r1", "num_steps": 3},
        "model": {"path": str(write_model(folder / "model"))},
        "data": {"train": str(write_rows(folder / "train.jsonl")), "max_prompt_tokens": 64},
        "generator": {"engine": "emulated"},
    }


def write_document(folder: Path, value: dict[str, Any]) -> Path:
    """The configuration as a file."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def environment() -> dict[str, str]:
    """The environment of a `penstock` that runs from any folder."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def penstock(*arguments: str, cwd: Path, timeout_s: float = 50.0) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        (*COMMAND, *arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def penstock_in_process(*arguments: str, cwd: Path) -> Result:
    """Run the command to its end in this process, where the process itself is not what is tested."""
    with contextlib.chdir(cwd), mock.patch.dict(os.environ):
        return CliRunner().invoke(app, arguments, prog_name="penstock")
