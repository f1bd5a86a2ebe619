"""Implements the heavy model: a small transformer fine-tuned to log lengths (StreamRL section 5.2). Imports no torch.

torch lives in child processes (`transformer_worker`): one per fit, which writes a model's folder, and a permanent one
that scores. Both can be killed, so a call that hangs costs a deadline, not the scheduler. Scores are cached by prompt:
a repeated prompt, for example in the next pass, is answered immediately, as is one whose score came too late.

Differences from the paper: a regression head on the last token instead of a length in words, since only a number is
needed; the head predicts log tokens; each fit continues from the last one's weights.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from services.scheduler.lengths.length_model import FitFailedError, LengthModel
from services.scheduler.lengths.ngrams import Floats
from services.scheduler.lengths.prompt_features import PromptView

TRANSFORMER = "transformer"
MAX_FIT_S = 1800.0
SCORE_TIMEOUT_S = 120.0
"""Deadline for BATCH_PROMPTS prompts, including loading the model."""
BATCH_PROMPTS = 64
MAX_SCORES = 65_536
NUM_KEPT_MODELS = 4
_MAX_ANSWER_CHARACTERS = 1024 * 1024
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
        self._scorer, self._fitter = _Child(), _Child()
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
        if self._is_closed:
            raise FitFailedError("the scheduler is stopping")
        try:
            self._fitter.ask({"fit": request}, timeout_s=MAX_FIT_S)
        finally:
            self._fitter.close()
        self._newest = folder
        shutil.rmtree(self._directory / f"fit-{self._num_fits - NUM_KEPT_MODELS}", ignore_errors=True)
        return TransformerModel(folder, self._scorer)

    def close(self) -> None:
        """End both processes; a fit under way fails."""
        self._is_closed = True
        self._fitter.close()
        self._scorer.close()


class TransformerModel:
    """A fitted model in a folder, and a cache of its scores."""

    name = TRANSFORMER

    def __init__(self, folder: Path, scorer: _Child) -> None:
        self._folder = folder
        self._scorer = scorer
        self._scores: OrderedDict[bytes, float] = OrderedDict()

    def predict(self, prompts: Sequence[PromptView]) -> Floats:
        """Implements `LengthModel`."""
        scores = {prompt.key: self._scores.get(prompt.key) for prompt in prompts}
        missing = list({prompt.key: prompt for prompt in prompts if scores[prompt.key] is None}.values())
        for start in range(0, len(missing), BATCH_PROMPTS):
            part = missing[start : start + BATCH_PROMPTS]
            found = dict(zip([prompt.key for prompt in part], self._scored(part), strict=True))
            scores |= found
            self._scores.update(found)
        while len(self._scores) > MAX_SCORES:
            self._scores.popitem(last=False)
        return np.array([scores[prompt.key] for prompt in prompts], dtype=np.float64)

    def _scored(self, prompts: Sequence[PromptView]) -> list[float]:
        request = {"folder": str(self._folder), "prompts": [_document(prompt) for prompt in prompts]}
        logs = self._scorer.ask(request, timeout_s=SCORE_TIMEOUT_S).get("logs")
        if not isinstance(logs, list) or len(logs) != len(prompts):
            raise FitFailedError("its process returned no scores")
        scores = np.array(logs, dtype=np.float64)
        if not np.isfinite(scores).all():
            raise FitFailedError("its scores are not numbers")
        return [float(score) for score in scores]


class _Child:
    """A process that answers requests; started on demand and restarted after a failure. Threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Its answer. Raises FitFailedError."""
        with self._lock:
            try:
                answer = self._exchange(json.dumps(request) + "\n", timeout_s)
            except (OSError, ValueError) as error:
                self._end()
                raise FitFailedError(f"its process does not answer: {error}") from error
        if "error" in answer:
            raise FitFailedError(str(answer["error"])[:300])
        return answer

    def _exchange(self, request: str, timeout_s: float) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._process = _spawn()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = threading.Timer(timeout_s, process.kill)
        watchdog.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline(_MAX_ANSWER_CHARACTERS)
        finally:
            is_late = not watchdog.is_alive()
            watchdog.cancel()
        if is_late:
            raise TimeoutError(f"no answer in {timeout_s:g} s")
        if not line.endswith("\n"):
            raise ValueError("its answer is too long" if line else "it ended; standard error says why")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ValueError("its answer is not an object")
        return answer

    def close(self) -> None:
        """End it; a request under way fails."""
        if (process := self._process) is not None:
            process.kill()
        # Only the thread that reads may close what it reads from.
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError), process:
                pass  # Closes its pipes and waits for it.


def _spawn() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _document(prompt: PromptView) -> dict[str, Any]:
    return {"text": prompt.text} if prompt.text else {"ids": prompt.words.tolist()}
