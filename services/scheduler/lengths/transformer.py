"""Implements the heavy model: a small transformer fine-tuned to log lengths (StreamRL section 5.2). Imports no torch.

torch lives in child processes (`transformer_worker`): one per fit, which writes a model's folder and exits, and a
permanent one that scores. Both can be killed, so a call that hangs costs a deadline, not the scheduler. Scores are
cached by prompt: a repeated prompt, for example in the next pass, is answered immediately, as is one whose score came
too late.

Differences from the paper: a regression head on the last token instead of a length in words, since only a number is
needed; the head predicts log tokens; each fit continues from the last one's weights.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from services.scheduler.lengths.learner import FitFailedError, LengthModel
from services.scheduler.lengths.ngrams import Floats
from services.scheduler.lengths.prompt_features import PromptView

TRANSFORMER = "transformer"
MAX_FIT_S = 1800.0
SCORE_TIMEOUT_S = 120.0
"""Deadline for BATCH_PROMPTS prompts, including loading the model."""
BATCH_PROMPTS = 64
MAX_SCORES = 65_536
NUM_KEPT_MODELS = 4
_MAX_ANSWER_BYTES = 1024 * 1024
_FIRST_EPOCHS, _NEXT_EPOCHS = 4, 1
_MODULE = "services.scheduler.lengths.transformer_worker"


class TransformerLearner:
    """Fits successive models into folders below `directory`, starting from the one at `model_path`."""

    name = TRANSFORMER
    needs_text = True
    strengths = (1.0,)

    def __init__(self, model_path: Path, directory: Path) -> None:
        self._model_path = model_path
        self._directory = directory
        self._scorer = _Scorer()
        self._process: subprocess.Popen[str] | None = None
        self._newest: Path | None = None
        self._num_fits = 0
        self._is_closed = False

    def fit(self, prompts: Sequence[PromptView], targets: Floats, weights: Floats, *, strength: float) -> LengthModel:
        """Implements `Learner`; there is nothing to regularise."""
        self._num_fits += 1
        folder = self._directory / f"fit-{self._num_fits}"
        shutil.rmtree(folder, ignore_errors=True)
        request = {
            "model_path": str(self._newest or self._model_path),
            "output": str(folder),
            "prompts": [_document(prompt) for prompt in prompts],
            "targets": targets.tolist(),
            "weights": weights.tolist(),
            "num_epochs": _NEXT_EPOCHS if self._newest else _FIRST_EPOCHS,
        }
        self._run_fit(json.dumps(request))
        self._newest = folder
        shutil.rmtree(self._directory / f"fit-{self._num_fits - NUM_KEPT_MODELS}", ignore_errors=True)
        return TransformerModel(folder, self._scorer)

    def _run_fit(self, request: str) -> None:
        if self._is_closed:
            raise FitFailedError("the scheduler is stopping")
        log = self._directory / "fit.log"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with log.open("w") as errors:
                process = self._process = _spawn("fit", errors=errors)
            assert process.stdin is not None
            with process.stdin as pipe:
                # Kept open until the fit is done: the child takes end of file for the death of this process.
                pipe.write(request + "\n")
                pipe.flush()
                status = process.wait(MAX_FIT_S)
        except subprocess.TimeoutExpired as error:
            raise FitFailedError(f"it took longer than {MAX_FIT_S:g} s") from error
        except OSError as error:
            raise FitFailedError(f"its process failed: {error}{_last_line(log)}") from error
        finally:
            self._end_fit()
        if status != 0:
            raise FitFailedError(f"its process ended with status {status}{_last_line(log)}")

    def _end_fit(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def close(self) -> None:
        """End both processes; a fit under way fails."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
        self._scorer.close()


class TransformerModel:
    """A fitted model in a folder, and a cache of its scores."""

    name = TRANSFORMER

    def __init__(self, folder: Path, scorer: _Scorer) -> None:
        self._folder = folder
        self._scorer = scorer
        self._scores: OrderedDict[bytes, float] = OrderedDict()

    def predict(self, prompts: Sequence[PromptView]) -> Floats:
        """Implements `LengthModel`."""
        scores = {prompt.key: self._scores.get(prompt.key) for prompt in prompts}
        missing = list({prompt.key: prompt for prompt in prompts if scores[prompt.key] is None}.values())
        for start in range(0, len(missing), BATCH_PROMPTS):
            part = missing[start : start + BATCH_PROMPTS]
            found = dict(zip([prompt.key for prompt in part], self._scorer.score(self._folder, part), strict=True))
            scores |= found
            self._scores.update(found)
        while len(self._scores) > MAX_SCORES:
            self._scores.popitem(last=False)
        return np.array([scores[prompt.key] for prompt in prompts], dtype=np.float64)


class _Scorer:
    """The child that scores; started on demand and restarted after a failure. Threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def score(self, folder: Path, prompts: Sequence[PromptView]) -> list[float]:
        """Log lengths by the model in `folder`. Raises FitFailedError."""
        request = {"folder": str(folder), "prompts": [_document(prompt) for prompt in prompts]}
        with self._lock:
            try:
                answer = self._ask(json.dumps(request) + "\n")
            except (OSError, ValueError) as error:
                self.close()
                raise FitFailedError(f"its process does not score: {error}") from error
        logs = answer.get("logs")
        if not isinstance(logs, list) or len(logs) != len(prompts):
            raise FitFailedError(str(answer.get("error", "its process returned no scores"))[:300])
        scores = np.array(logs, dtype=np.float64)
        if not np.isfinite(scores).all():
            raise FitFailedError("its scores are not numbers")
        return [float(score) for score in scores]

    def _ask(self, request: str) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._process = _spawn("score")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request)
        self._process.stdin.flush()
        answer = json.loads(_read_line(self._process.stdout.fileno(), timeout_s=SCORE_TIMEOUT_S))
        if not isinstance(answer, dict):
            raise ValueError("its answer is not an object")
        return answer

    def close(self) -> None:
        """End the child."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _read_line(descriptor: int, *, timeout_s: float) -> bytes:
    """Read one line; raises TimeoutError, or ValueError if it is too long or the other side closed the pipe."""
    deadline_s = time.monotonic() + timeout_s
    parts = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not parts.endswith(b"\n"):
            if not selector.select(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError(f"no answer in {timeout_s:g} s")
            part = os.read(descriptor, 65_536)
            if not part or len(parts) > _MAX_ANSWER_BYTES:
                raise ValueError("its answer was cut off" if not part else "its answer is too long")
            parts += part
    return parts


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
    return f": {lines[-1][:300]}" if lines else ""


def _spawn(what: str, *, errors: IO[str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
    )


def _document(prompt: PromptView) -> dict[str, Any]:
    return {"text": prompt.text} if prompt.text else {"ids": prompt.words.tolist()}
