"""Prepares the quick start: data files and a warm-started model, kept until their settings change.

    DIRECTORY/seed_0_3f9a0c1b2d4e/
        model/           Hugging Face directory of the warm-started model
        train.jsonl      {"prompt": ..., "answer": ...} rows
        eval.jsonl       held-out rows, none of which occurs in train.jsonl or in the warm start
        prepared.json    completion marker: what was measured

Invariants:
- A folder's name holds the seed and a digest of the settings and of this package's source: another seed, setting or
  version of the code never reuses it.
- A folder appears under its name only when complete, with its marker written last; one without a marker is rebuilt.
- Two processes that prepare the same folder at once both end with a complete one.
"""

import hashlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from quickstart.arithmetic import sample_distinct_problems, write_rows
from quickstart.tiny_model import build_model, build_tokenizer, save_model
from quickstart.warm_start import WarmStartResult, WarmStartSettings, warm_start

_MARKER_NAME = "prepared.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """Settings that decide the prepared files, besides the seed."""

    num_train_problems: int = 8192
    num_eval_problems: int = 384
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Paths of the prepared files."""

    model_dir: Path
    train_path: Path
    eval_path: Path


def prepare(
    directory: Path,
    *,
    seed: int,
    on_progress: Callable[[str], None],
    settings: PrepareSettings | None = None,
) -> Prepared:
    """Return the quick start's files, making them first if they are missing or have other settings.

    Args:
        directory: Cache; created if it does not exist.
        seed: Decides data, initial weights and warm start.
        on_progress: Called occasionally with one line of text.
        settings: The defaults unless given; tests use smaller ones.
    """
    settings = settings or PrepareSettings()
    folder = directory / f"seed_{seed}_{_digest(settings)}"
    prepared = Prepared(model_dir=folder / "model", train_path=folder / "train.jsonl", eval_path=folder / "eval.jsonl")
    if (folder / _MARKER_NAME).is_file():
        on_progress("quick-start model and data are already prepared")
        return prepared
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing_", dir=directory) as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        _build(built, seed=seed, settings=settings, on_progress=on_progress)
        _move_into_place(built, folder)
    return prepared


def _build(folder: Path, *, seed: int, settings: PrepareSettings, on_progress: Callable[[str], None]) -> None:
    started_s = time.monotonic()
    rng = random.Random(seed)
    held_out = sample_distinct_problems(rng, held_out=True, num_problems=settings.num_eval_problems)
    write_rows(folder / "eval.jsonl", held_out)
    train = sample_distinct_problems(rng, held_out=False, num_problems=settings.num_train_problems)
    write_rows(folder / "train.jsonl", train)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed)
    on_progress(f"warm start: a model of {model.num_parameters():,} parameters")
    # A second thread gains a third on an idle machine and loses a factor of ten if it must share its core.
    torch.set_num_threads(1)
    result = warm_start(model, tokenizer, held_out, seed=seed, settings=settings.warm_start, on_progress=on_progress)
    save_model(model, tokenizer, folder / "model")
    on_progress(_summarize(result, time.monotonic() - started_s))
    (folder / _MARKER_NAME).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")


def _summarize(result: WarmStartResult, wall_s: float) -> str:
    outcome = "in" if result.is_in_band else "OUTSIDE"
    return (
        f"warm start: done after {result.num_steps} steps and {wall_s:.0f} s, {outcome} the accuracy band "
        f"({result.sampled_accuracy:.3f} sampled, {result.greedy_accuracy:.3f} greedy)"
    )


def _move_into_place(built: Path, folder: Path) -> None:
    if folder.exists() and not (folder / _MARKER_NAME).is_file():
        shutil.rmtree(folder)
    try:
        built.rename(folder)
    except OSError:
        # Another process finished the same folder first; its files are equivalent.
        if not (folder / _MARKER_NAME).is_file():
            raise


def _digest(settings: PrepareSettings) -> str:
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
