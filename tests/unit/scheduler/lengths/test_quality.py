import numpy as np
import pytest

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths.quality import measure, recall_of_longest, spearman

LENGTHS = np.arange(1.0, 101.0)


def test_recall_counts_the_longest_that_were_forecast():
    forecasts = LENGTHS.copy()
    forecasts[90:] = 0.0
    assert recall_of_longest(LENGTHS, LENGTHS, 0.2) == 1.0
    assert recall_of_longest(LENGTHS, forecasts, 0.2) == 0.5
    assert recall_of_longest(LENGTHS, -LENGTHS, 0.2) == 0.0


def test_one_forecast_for_all_finds_as_many_as_chance_does():
    assert recall_of_longest(LENGTHS, np.ones(100), 0.2) == pytest.approx(0.2)
    assert recall_of_longest(LENGTHS, np.ones(100), 0.05) == pytest.approx(0.05)


def test_spearman_is_about_ranks_and_takes_ties_by_their_mean():
    assert spearman(LENGTHS, LENGTHS**3) == pytest.approx(1.0)
    assert spearman(LENGTHS, -LENGTHS) == pytest.approx(-1.0)
    # By hand: ranks 1 2 3 4 against 1.5 1.5 3 4.
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([5.0, 5, 6, 7])) == pytest.approx(4.5 / np.sqrt(5 * 4.5))
    assert spearman(LENGTHS, np.ones(100)) is None


def test_all_numbers_together():
    forecasts = [
        pb.LengthForecast(expected_tokens=each + 3, low_tokens=low, high_tokens=low + 2)
        for each, low in zip(LENGTHS, LENGTHS - 1 + 50 * (LENGTHS <= 25), strict=True)
    ]
    quality = measure(LENGTHS, forecasts, forecaster="f", test=pb.LENGTH_TEST_HELD_OUT)
    assert quality.interval_coverage == 0.75
    assert quality.mean_absolute_error_tokens == pytest.approx(3.0)
    assert [bucket.num_samples for bucket in quality.buckets] == [20] * 5
    assert [bucket.expected_tokens - bucket.mean_tokens for bucket in quality.buckets] == pytest.approx([3.0] * 5)
    forecast = pb.LengthForecast(expected_tokens=9)
    alone = measure(np.array([7.0]), [forecast], forecaster="f", test=pb.LENGTH_TEST_PREQUENTIAL)
    assert alone.recall_longest_5_percent == 1.0
    assert not alone.HasField("spearman")
    assert not alone.HasField("interval_coverage")
