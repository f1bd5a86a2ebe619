"""The transformer that forecasts lengths: a tiny one from a folder, in processes of its own."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from penstock.clock import SystemClock
from penstock.config import ConfigError, validate
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.config import LengthsConfig
from services.scheduler.lengths import transformer
from services.scheduler.lengths.forecaster import LengthForecaster
from services.scheduler.lengths.length_model import FitFailedError
from services.scheduler.lengths.prompt_features import PromptView, make_prompt
from services.scheduler.lengths.quality import spearman
from services.scheduler.lengths.transformer import TransformerLearner
from services.scheduler.server import make_forecaster
from tests.helpers.models.tiny_model import make_tiny_model

NUM_PROMPTS = 240

pytestmark = pytest.mark.timeout(240)


def made() -> tuple[list[PromptView], np.ndarray]:
    """Prompts of which the second letter says how long the answer is."""
    rng = random.Random(0)
    letters = "abcdefgh"
    texts = [f"q{rng.choice(letters)} " + "".join(rng.choices("xyz", k=6)) + "=" for _ in range(NUM_PROMPTS)]
    logs = np.array([3.0 + 0.5 * letters.index(text[1]) + rng.gauss(0, 0.1) for text in texts])
    return [make_prompt(np.zeros(0, np.uint32), text, group_id=str(index)) for index, text in enumerate(texts)], logs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ranker"))


@pytest.fixture
def learner(model: Path, tmp_path: Path) -> Iterator[TransformerLearner]:
    learner = TransformerLearner(model, tmp_path / "fits")
    yield learner
    learner.close()


@pytest.mark.grid
def test_it_learns_what_the_prompt_shows(learner: TransformerLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, logs = made()
    monkeypatch.setattr(transformer, "_FIRST_EPOCHS", 16)
    model = learner.fit(prompts[:180], logs[:180], np.ones(180), strength=1.0)
    scores = model.predict(prompts[180:])
    rank = spearman(logs[180:], scores)
    assert rank is not None
    assert rank > 0.8
    # The same process says what it cannot do, and goes on.
    with pytest.raises(FitFailedError, match=r"lengths\.json"):
        transformer.TransformerModel(Path("gone"), learner._scorer).predict(prompts[:2])
    unreadable = make_prompt(np.array([1 << 30], np.uint32), "")
    assert model.predict([unreadable])[0] == pytest.approx(logs[:180].mean())
    # Scores are kept: no process is asked about what was asked before.
    learner.close()
    assert np.array_equal(model.predict(prompts[180:]), scores)
    with pytest.raises(FitFailedError, match="stopping"):
        learner.fit(prompts, logs, np.ones(NUM_PROMPTS), strength=1.0)


def test_a_model_that_cannot_be_fine_tuned_is_named(tmp_path: Path) -> None:
    prompts, logs = made()
    learner = TransformerLearner(tmp_path / "nowhere", tmp_path / "fits")
    with pytest.raises(FitFailedError, match="nowhere"):
        learner.fit(prompts, logs, np.ones(NUM_PROMPTS), strength=1.0)


def test_a_process_that_hangs_costs_a_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    prompts, logs = made()

    def spawn():
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(transformer, "_spawn", spawn)
    monkeypatch.setattr(transformer, "MAX_FIT_S", 0.2)
    monkeypatch.setattr(transformer, "SCORE_TIMEOUT_S", 0.2)
    learner = TransformerLearner(model, tmp_path)
    started_s = time.monotonic()
    with pytest.raises(FitFailedError, match=r"no answer in 0\.2 s"):
        learner.fit(prompts, logs, np.ones(NUM_PROMPTS), strength=1.0)
    with pytest.raises(FitFailedError, match="no answer"):
        transformer.TransformerModel(tmp_path, learner._scorer).predict(prompts[:1])
    learner.close()
    assert time.monotonic() - started_s < 20


async def test_the_scheduler_forecasts_with_it_and_with_ridge_where_it_is_late(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "_FIRST_EPOCHS", 1)
    config = LengthsConfig(model_path=model, state_dir=tmp_path)
    forecaster = make_forecaster(config, clock=SystemClock(), registry=CollectorRegistry())
    prompts, logs = made()
    queries = [pb.LengthQuery(group_id=f"g{index}", prompt_text=each.text) for index, each in enumerate(prompts)]
    lengths = np.round(np.exp(logs)).astype(int)
    await forecaster.observe(
        "r",
        [
            pb.LengthObservation(query=query, num_completion_tokens=int(length))
            for query, length in zip(queries, lengths, strict=True)
        ],
    )
    try:
        await forecaster.refresh()
        described = forecaster.describe("r")
        assert (described.model, described.fit_problem) == ("transformer", "")
        assert [each.forecaster for each in described.qualities] == ["transformer", "prompt_length", "ridge"]
        new = [pb.LengthQuery(group_id=f"n{index}", prompt_text=f"q{letter} new=") for index, letter in enumerate("ah")]
        await _forecast_by(forecaster, new, "transformer")
        short, long = (await forecaster.forecast("r", new))[0]
        assert short.expected_tokens > 0
        assert long.expected_tokens > 0
    finally:
        await forecaster.close()


async def _forecast_by(forecaster: LengthForecaster, queries: list[pb.LengthQuery], name: str) -> None:
    """Ask until that model answers: a first answer may be late, and is then the light model's."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        started_s = time.monotonic()
        await forecaster.forecast("r", queries)
        assert time.monotonic() - started_s < 5
        if forecaster._metrics.forecasts.labels(name)._value.get():
            return
    raise AssertionError(f"{name} never answered")


def test_a_model_needs_a_place_for_its_fits(model: Path) -> None:
    with pytest.raises(ConfigError, match="state_dir: needed with model_path"):
        validate(LengthsConfig, {"model_path": model}, source="c.yaml")
