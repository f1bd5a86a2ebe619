"""Lengths of emulated completions follow their law or their file."""

from __future__ import annotations

import numpy as np
import pytest

from services.generator.emulation.config import EmulatedConfig
from services.generator.emulation.length_law import HistogramLengths, read_lengths
from services.generator.engines.emulated.config import EmulatedEngineConfig


def test_the_histogram_has_streamrls_mean_and_quantiles() -> None:
    rng = np.random.default_rng(0)
    lengths = [HistogramLengths().draw(rng, None) for _ in range(20_000)]
    assert np.mean(lengths) == pytest.approx(4_930, rel=0.03)
    assert np.quantile(lengths, [0.5, 0.8, 0.95]) == pytest.approx([3_200, 7_000, 16_300], rel=0.05)
    assert 828 <= min(lengths) <= max(lengths) <= 828 + 30 * 635.2
    longest = sorted(lengths)[-4_000:]
    assert sum(longest) / sum(lengths) == pytest.approx(0.51, abs=0.02)


def test_a_seed_names_the_line_it_replays(tmp_path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n17\n9\n", encoding="utf-8")
    law, rng = read_lengths(path), np.random.default_rng(0)
    assert [law.draw(rng, seed) for seed in range(4)] == [5, 17, 9, 5]
    assert {law.draw(rng, None) for _ in range(100)} == {5, 9, 17}


@pytest.mark.parametrize(
    ("text", "complaint"), [("", "holds no lengths"), ("5\nx\n", "entry 2"), ("0", "entry 1"), ("9" * 40, "entry 1")]
)
def test_a_file_that_holds_no_lengths_is_refused_by_name(tmp_path, text: str, complaint: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=complaint) as caught:
        read_lengths(path)
    assert str(path) in str(caught.value)


def test_impossible_laws_are_refused() -> None:
    with pytest.raises(ValueError, match="length_scale"):
        EmulatedConfig(length_scale=0)
    with pytest.raises(ValueError, match="emulated_mean_tokens"):
        EmulatedEngineConfig(emulated_mean_tokens=0)
