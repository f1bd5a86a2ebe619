from __future__ import annotations

from services.generator.decoding.token_rate import TokenRate


def test_the_rate_is_of_the_last_whole_window():
    rate = TokenRate()
    assert rate.update(0, 10.0) == 0.0
    assert rate.update(100, 10.5) == 0.0
    assert rate.update(300, 12.0) == 150.0
    assert rate.update(9000, 12.2) == 150.0
    assert rate.update(300, 14.0) == 0.0
