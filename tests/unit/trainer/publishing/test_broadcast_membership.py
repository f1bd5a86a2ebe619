"""Whom a broadcast waits for, and whom it does without for a while."""

from __future__ import annotations

from services.trainer.publishing.broadcast_membership import (
    FIRST_LEFT_OUT_S,
    LEFT,
    MAX_LEFT_OUT_S,
    OK,
    BroadcastMembership,
)


def watched_by(*receiver_ids: str) -> BroadcastMembership:
    attendance = BroadcastMembership()
    for receiver_id in receiver_ids:
        attendance.arrive(receiver_id)
    return attendance


def test_who_watches_is_expected_until_the_last_watch_ends():
    attendance = watched_by("a", "b", "a")
    attendance.leave("a")
    assert attendance.expected(now_s=0) == {"a", "b"}
    attendance.leave("a")
    assert attendance.expected(now_s=0) == {"b"}


def test_who_did_not_come_is_expected_again_once_it_asks():
    attendance = watched_by("a", "b")
    attendance.note_absent({"b"})
    assert attendance.expected(now_s=0) == {"a"}
    attendance.note_asked("b")
    assert attendance.expected(now_s=0) == {"a", "b"}


def test_a_silent_member_is_left_out_twice_as_long_each_time_until_a_broadcast_goes_well():
    attendance = watched_by("a", "b")
    now_s = 1000.0
    for factor in (1, 2, 4):
        assert attendance.note_end({"a": "failed", "b": None}, is_sent=False, now_s=now_s) == ["b"]
        assert attendance.expected(now_s=now_s) == {"a"}
        assert attendance.is_left_out("b", now_s=now_s + factor * FIRST_LEFT_OUT_S - 1)
        now_s += factor * FIRST_LEFT_OUT_S
        assert not attendance.is_left_out("b", now_s=now_s)
    assert attendance.note_end({"a": OK, "b": OK}, is_sent=True, now_s=now_s) == []
    attendance.note_end({"a": "failed", "b": LEFT}, is_sent=False, now_s=now_s)
    assert not attendance.is_left_out("b", now_s=now_s + FIRST_LEFT_OUT_S)


def test_if_none_stands_out_all_are_left_out_and_never_longer_than_the_limit():
    attendance = watched_by("a", "b")
    for _ in range(20):
        assert attendance.note_end({"a": "failed", "b": "failed"}, is_sent=False, now_s=0) == ["a", "b"]
    assert attendance.expected(now_s=0) == set()
    assert attendance.expected(now_s=MAX_LEFT_OUT_S) == {"a", "b"}


def test_who_comes_back_starts_again():
    attendance = watched_by("a")
    attendance.note_end({"a": None}, is_sent=False, now_s=0)
    attendance.leave("a")
    attendance.arrive("a")
    assert attendance.expected(now_s=0) == {"a"}
