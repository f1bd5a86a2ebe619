"""Keeps what was learned on disk: one file per run, written atomically and read when the scheduler starts.

A file holds numpy arrays and one JSON text; nothing in it is executed. An unusable file (damaged, or of another format)
is skipped with a warning, and the run learns from scratch. Only the MAX_FILES most recently written files are kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
from google.protobuf import json_format
from pydantic import BaseModel

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths import ngrams
from services.scheduler.lengths.conformal import ErrorShape
from services.scheduler.lengths.fitting import Fit
from services.scheduler.lengths.prompt_features import PromptLengths, PromptView
from services.scheduler.lengths.ridge import PROMPT_LENGTH, RIDGE, RidgeModel

MAX_FILES = 16
MAX_FILE_BYTES = 256 * 1024 * 1024
FORMAT = 1
_SUFFIX = ".lengths.npz"

_UNUSABLE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, json_format.ParseError),
)
"""Errors of reading a damaged file."""

_log = structlog.get_logger()
_Arrays = dict[str, npt.NDArray[Any]]


class Progress(BaseModel):
    """How far a run's forecaster has come."""

    run_id: str
    model_version: int = 0
    num_observations: int = 0
    fit_time_s: float = 0.0
    fit_duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLengths:
    """Saved state of a run."""

    progress: Progress
    pairs: tuple[PromptLengths, ...]
    fit: Fit | None
    """The light model's fit; slower models are fitted again."""


class StateFiles:
    """The files of one folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, saved: SavedLengths) -> None:
        """Write a run's file and remove the oldest beyond MAX_FILES. Blocks; raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{hashlib.sha256(saved.progress.run_id.encode()).hexdigest()[:32]}{_SUFFIX}"
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **_pack(saved))
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, path)
        for old in self._paths()[MAX_FILES:]:
            old.unlink(missing_ok=True)

    def load_all(self) -> list[SavedLengths]:
        """Every readable run, the most recently written first. Blocks."""
        found = []
        for path in self._paths()[:MAX_FILES]:
            try:
                if path.stat().st_size > MAX_FILE_BYTES:
                    raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
                with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
                    found.append(_unpack(dict(arrays)))
            except _UNUSABLE as error:
                _log.warning("unusable saved lengths; the run learns from scratch", path=str(path), error=str(error))
        return found

    def _paths(self) -> list[Path]:
        paths = [path for path in self._directory.glob(f"*{_SUFFIX}") if path.is_file()]
        return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def _pack(saved: SavedLengths) -> _Arrays:
    meta = {
        **saved.progress.model_dump(),
        "format": FORMAT,
        "ngrams_format": ngrams.FORMAT,
        "texts": [pair.prompt.text for pair in saved.pairs],
        "qualities": [json_format.MessageToDict(quality) for quality in (saved.fit.qualities if saved.fit else ())],
    }
    prompts = [pair.prompt for pair in saved.pairs]
    arrays: _Arrays = {
        "meta": np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
        "keys": np.frombuffer(b"".join(prompt.key for prompt in prompts), dtype=np.uint8),
        "words": np.concatenate([np.zeros(0, np.uint32), *(prompt.words for prompt in prompts)]),
        "num_words": np.array([len(prompt.words) for prompt in prompts], dtype=np.int64),
        "num_tokens": np.array([prompt.num_tokens for prompt in prompts], dtype=np.int64),
        "logs": np.array([log for pair in saved.pairs for log in pair.logs], dtype=np.float64),
        "num_logs": np.array([len(pair.logs) for pair in saved.pairs], dtype=np.int64),
    }
    if saved.fit is not None and isinstance(saved.fit.model, RidgeModel) and isinstance(saved.fit.baseline, RidgeModel):
        arrays |= {f"model/{name}": array for name, array in saved.fit.model.arrays().items()}
        arrays |= {f"baseline/{name}": array for name, array in saved.fit.baseline.arrays().items()}
        arrays |= saved.fit.shape.arrays()
    return arrays


def _unpack(arrays: _Arrays) -> SavedLengths:
    meta = json.loads(arrays["meta"].tobytes())
    if (meta["format"], meta["ngrams_format"]) != (FORMAT, ngrams.FORMAT):
        raise ValueError(f"format {meta['format']}, expected {FORMAT}")
    word_ends, log_ends = np.cumsum(arrays["num_words"]), np.cumsum(arrays["num_logs"])
    words = np.split(arrays["words"].astype(np.uint32), word_ends[:-1])
    logs = np.split(arrays["logs"], log_ends[:-1])
    keys = arrays["keys"].reshape(-1, 16)
    columns = zip(keys, words, arrays["num_tokens"], meta["texts"], logs, strict=True)
    pairs = tuple(
        PromptLengths(
            prompt=PromptView(key=key.tobytes(), words=part, num_tokens=int(number), text=str(text)),
            logs=tuple(float(log) for log in own),
        )
        for key, part, number, text, own in columns
        if len(own)
    )
    return SavedLengths(
        progress=Progress.model_validate(meta),
        pairs=pairs,
        fit=_unpack_fit(arrays, meta) if "model/kept" in arrays else None,
    )


def _unpack_fit(arrays: _Arrays, meta: dict[str, Any]) -> Fit:
    def part(prefix: str) -> _Arrays:
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    return Fit(
        model=RidgeModel.from_arrays(RIDGE, part("model/")),
        baseline=RidgeModel.from_arrays(PROMPT_LENGTH, part("baseline/")),
        shape=ErrorShape.from_arrays(arrays),
        qualities=tuple(json_format.ParseDict(each, pb.LengthQuality()) for each in meta["qualities"]),
    )
