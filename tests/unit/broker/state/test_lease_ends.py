"""Leases that have ended are found without looking at every lease every time, and none is missed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.broker.records.store import SampleId
from services.broker.state import lease_ends
from services.broker.state.lease_ends import LeaseEnds


class Looked:
    """When each lease ends, and which were looked at."""

    def __init__(self, **ends_s: float) -> None:
        self.ends_s, self.names = dict(ends_s), list[str]()

    def __call__(self, sample: SampleId) -> float:
        self.names.append(sample[0])
        return self.ends_s[sample[0]]

    def taken(self) -> list[str]:
        names, self.names = self.names, []
        return names


def held(*names: str) -> dict[str, SampleId]:
    return {f"lease of {name}": (name, 0) for name in names}


def test_a_holder_is_looked_at_again_when_its_first_lease_may_have_ended() -> None:
    ends, end_s = LeaseEnds(), Looked(a=10.0, b=20.0, c=30.0)
    leases = {"g": held("a", "b"), "h": held("c")}
    assert ends.ended(leases, end_s, 5.0) == {}
    assert end_s.taken() == ["a", "b", "c"]
    assert ends.ended(leases, end_s, 9.0) == {}
    assert end_s.taken() == []
    assert ends.ended(leases, end_s, 10.0) == {"a": [0]}
    assert end_s.taken() == ["a", "b"]
    # Forgotten, as when changes are undone, all are looked at again.
    ends.forget()
    end_s.ends_s["c"] = 11.0
    assert ends.ended({"g": held("b"), "h": held("c")}, end_s, 12.0) == {"c": [0]}


def test_a_bounded_number_is_examined_at_once_and_the_rest_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_ends, "MAX_LOOKED", 2)
    ends, end_s = LeaseEnds(), Looked(a=1.0, b=99.0, c=1.0, d=99.0, e=1.0)
    leases = {"g": held("a", "b"), "h": held("c", "d"), "i": held("e")}
    found: list[str] = []
    for _ in range(3):
        for name in ends.ended(leases, end_s, 2.0):
            found.append(name)
            for each in leases.values():
                each.pop(f"lease of {name}", None)
        assert len(end_s.taken()) <= 2
    assert found == ["a", "c", "e"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)), max_size=40))
def test_none_is_missed_whatever_is_leased_and_renewed(steps: list[tuple[int, int, int]]) -> None:
    ends, end_s, leases, now_s = LeaseEnds(), Looked(), dict[str, dict[str, SampleId]](), 0.0
    for number, (holder, which, passed) in enumerate(steps):
        now_s += passed
        samples = leases.setdefault(str(holder), {})
        if which < len(samples):
            end_s.ends_s[list(samples.values())[which][0]] = now_s + 5.0
        else:
            samples |= held(str(number))
            end_s.ends_s[str(number)] = now_s + 5.0
        due = {sample[0] for each in leases.values() for sample in each.values() if end_s.ends_s[sample[0]] <= now_s}
        assert ends.ended(leases, end_s, now_s).keys() == due
        for each in leases.values():
            for name in due:
                each.pop(f"lease of {name}", None)
