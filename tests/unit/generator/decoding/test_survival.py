from __future__ import annotations

import numpy as np
import pytest

from services.generator.decoding.survival import survival


def bins(*values):
    return np.asarray(values, np.int64)


def test_without_running_samples_it_is_the_share_that_got_longer():
    assert survival(bins(0, 1, 1, 3), bins(), 5).tolist() == [0.75, 0.25, 0.25, 0.0, 0.0]


def test_a_running_sample_counts_as_long_as_it_is_known_to_be():
    # Kaplan and Meier by hand: at bin 1 one of four ends, at bin 3 one of the two that are left.
    assert survival(bins(1, 3), bins(2, 4), 5).tolist() == pytest.approx([1.0, 0.75, 0.75, 0.375, 0.375])


def test_samples_that_outlast_all_others_are_not_taken_to_end():
    shares = survival(bins(0, 0, 1), bins(7), 10)
    assert shares[7] == shares[9] == shares[1] > 0


def test_nothing_known_means_nothing_ends():
    assert survival(bins(), bins(), 3).tolist() == [1.0, 1.0, 1.0]
