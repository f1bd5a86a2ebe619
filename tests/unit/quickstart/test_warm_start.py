"""The warm start: it learns, and it stops by measured accuracy."""

import random

import pytest
import torch

from quickstart.arithmetic import sample_distinct_problems
from quickstart.tiny_model import build_model, build_tokenizer
from quickstart.warm_start import AccuracyBand, WarmStartResult, WarmStartSettings, warm_start

pytestmark = pytest.mark.slow

SHORT = WarmStartSettings(
    max_batch_tokens=512, num_curriculum_steps=40, num_decay_steps=20, max_steps=24, check_every_steps=4
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small products only lose time to a second thread."""
    torch.set_num_threads(1)


def run(settings: WarmStartSettings) -> tuple[WarmStartResult, list[str]]:
    """Warm-start a fresh model; returns the outcome and the progress lines."""
    tokenizer = build_tokenizer()
    lines: list[str] = []
    held_out = sample_distinct_problems(random.Random(0), held_out=True, num_problems=4)
    result = warm_start(
        build_model(tokenizer, seed=0), tokenizer, held_out, seed=0, settings=settings, on_progress=lines.append
    )
    return result, lines


def losses(lines: list[str]) -> list[float]:
    """The losses told in the progress lines."""
    return [float(line.split("loss ")[1].split(",")[0]) for line in lines]


def test_loss_falls_and_a_band_out_of_reach_ends_at_the_last_step() -> None:
    result, lines = run(SHORT)
    assert losses(lines)[-1] < 0.7 * losses(lines)[0]
    assert result.num_steps == SHORT.max_steps
    assert not result.is_in_band


def test_training_stops_at_the_first_measurement_inside_the_band() -> None:
    band = AccuracyBand(min_sampled=0.0, max_sampled=1.0, min_greedy=0.0)
    result, _ = run(
        WarmStartSettings(max_batch_tokens=256, num_decay_steps=4, max_steps=40, check_every_steps=4, band=band)
    )
    assert result.num_steps == 4
    assert result.is_in_band
