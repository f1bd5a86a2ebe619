"""Lengths of prompts and completions for a planning problem, from a recording or from rows of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean

from console.config.config import RECORDING_SUFFIXES
from console.recording.reader import read_rows as read_recording
from console.recording.recorded_sample import RecordingError
from console.recording.row_codec import STEP_COLUMNS
from penstock.config import Document
from penstock.wire.score_rules import ENVIRONMENT_WAIT_S

MAX_SAMPLES = 100_000
"""Samples of a recording that are looked at, from its beginning."""
MAX_ROWS = 2000
"""Rows whose prompts are tokenised, evenly spread over the file."""
MAX_VALUES = 1000
"""Completion lengths that the problem states, as quantiles of all that were seen."""
_COLUMNS = ("prompt_token_ids", "token_ids")
_SCORE = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What a file says."""

    prompt_tokens: float
    """Mean."""
    completion_tokens: tuple[int, ...] = ()
    """Each sample's; empty if the file has prompts only."""
    environment_wait_s: float | None = None
    """Mean time for which a session waited for its environment; None if the file says nothing of it."""


def read_lengths(path: Path, model: Path, *, max_prompt_tokens: int | None) -> Lengths:
    """Lengths from a recording, or of prompts by the model's tokenizer. Raises ConfigError.

    Args:
        path: A recording or a data file of `penstock run`.
        model: Folder of the tokenizer.
        max_prompt_tokens: Rows with longer prompts do not count: a run leaves them out.
    """
    return _recorded(path) if _is_recording(path) else _tokenised(path, model, max_prompt_tokens)


def _is_recording(path: Path) -> bool:
    if path.suffix not in RECORDING_SUFFIXES or not path.is_file():
        return False
    try:
        first = next(read_recording(path), None)
    except RecordingError:
        return False
    return first is not None and {*STEP_COLUMNS, *_COLUMNS} <= first[1].keys()


def _recorded(path: Path) -> Lengths:
    prompts: list[int] = []
    completions: list[int] = []
    waits: list[float] = []
    for where, row in islice(read_recording(path, (*_COLUMNS, _SCORE)), MAX_SAMPLES):
        try:
            details = dict((row.get(_SCORE) or {}).get("details") or ())
            waits += [float(details[ENVIRONMENT_WAIT_S])] if ENVIRONMENT_WAIT_S in details else []
            prompts.append(len(row["prompt_token_ids"]))
            completions.append(max(1, len(row["token_ids"])))
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{where}: holds no token ids, or a damaged score; is this a recording?") from error
    return Lengths(
        prompt_tokens=mean(prompts),
        completion_tokens=tuple(completions),
        environment_wait_s=mean(waits) if waits else None,
    )


def _tokenised(path: Path, model: Path, max_prompt_tokens: int | None) -> Lengths:
    from services.trainer.data.prompt_order import encoded
    from services.trainer.data.prompt_rows import DataError, read_rows
    from services.trainer.data.tokenizer import HuggingFaceTokenizer

    rows = read_rows(path)
    sample = rows[:: max(1, len(rows) // MAX_ROWS)][:MAX_ROWS]
    lengths = [len(token_ids) for token_ids in encoded(sample, HuggingFaceTokenizer(model))]
    kept = [length for length in lengths if max_prompt_tokens is None or length <= max_prompt_tokens]
    if not kept:
        raise DataError(f"{path}: every prompt is longer than data.max_prompt_tokens = {max_prompt_tokens}; raise it")
    return Lengths(prompt_tokens=mean(kept))


def output_lengths(completions: Sequence[int], *, longest: int | None) -> Document:
    """The distribution as a problem states it; `longest` is what the run allows."""
    ordered = sorted(completions)
    step = max(1.0, len(ordered) / MAX_VALUES)
    values = [ordered[int((index + 0.5) * step)] for index in range(int(len(ordered) / step))]
    return {"type": "empirical", "values": values, "max": max(longest or 0, ordered[-1])}
