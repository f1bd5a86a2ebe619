"""Which steps of a full file of kept samples stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.process.thinned_file import chosen


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=200), to_bytes=st.integers(100, 5000))
def test_the_rest_fits_keeps_its_order_and_has_the_first_and_the_newest_step(sizes: list[int], to_bytes: int) -> None:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    steps = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    kept = chosen(steps, to_bytes=to_bytes)
    assert sum(end - begin for begin, end in kept) <= to_bytes
    assert kept == [step for step in steps if step in kept]
    assert kept[-1] == steps[-1]
    assert kept[0] == steps[0] or len(kept) == 1


def test_what_is_old_is_thinned_most() -> None:
    kept: list[tuple[int, int]] = []
    for begin in range(1000):
        kept = [*kept, (begin, begin + 1)]
        if len(kept) > 40:
            kept = chosen(kept, to_bytes=30)
    found = [begin for begin, _ in kept]
    assert len([begin for begin in found if begin >= 980]) >= 10
    assert 1 <= len([begin for begin in found if begin < 500]) <= 15
