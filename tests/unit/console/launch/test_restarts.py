"""When a process that ended is started again, on a virtual clock."""

from __future__ import annotations

from console.launch.restarts import (
    FIRST_PAUSE_S,
    MAX_FAILED_STARTS,
    MAX_RESTARTS,
    MOST_DELAY_S,
    MOST_PAUSE_S,
    WINDOW_S,
    RestartBudget,
    Verdict,
)

WEEK_S = 7 * 86400.0


class Life:
    """A process and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.budget = RestartBudget(now_s=lambda: self.now_s)

    def live_and_die(self, up_s: float | None) -> Verdict:
        """It is up for that long, ends, and waits as long as it has to."""
        self.now_s += up_s or 1.0
        verdict = self.budget.ended(up_s=up_s)
        self.now_s += verdict.delay_s
        return verdict


def test_a_death_a_week_never_adds_up() -> None:
    life = Life()
    verdicts = [life.live_and_die(WEEK_S) for _ in range(100)]
    assert not any(verdict.is_pause for verdict in verdicts)
    assert max(verdict.delay_s for verdict in verdicts) < 1


def test_many_deaths_within_the_window_pause_it_longer_each_time() -> None:
    life = Life()
    verdicts = [life.live_and_die(5.0) for _ in range(400)]
    pauses_s = [verdict.delay_s for verdict in verdicts if verdict.is_pause]
    assert [verdict.is_pause for verdict in verdicts[: MAX_RESTARTS + 1]] == MAX_RESTARTS * [False] + [True]
    assert pauses_s[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert max(pauses_s) == MOST_PAUSE_S


def test_starts_that_fail_pause_it_at_once_after_the_first_few() -> None:
    life = Life()
    verdicts = [life.live_and_die(None) for _ in range(12)]
    assert [verdict.is_pause for verdict in verdicts] == (MAX_FAILED_STARTS - 1) * [False] + 10 * [True]
    assert verdicts[-1].delay_s == MOST_PAUSE_S
    assert all(verdict.delay_s <= MOST_DELAY_S for verdict in verdicts if not verdict.is_pause)


def test_after_a_whole_window_up_it_begins_afresh() -> None:
    life = Life()
    for _ in range(8):
        life.live_and_die(None)
    assert not life.live_and_die(WINDOW_S + 1).is_pause
    verdicts = [life.live_and_die(1.0) for _ in range(MAX_RESTARTS + 1)]
    assert next(verdict.delay_s for verdict in verdicts if verdict.is_pause) == FIRST_PAUSE_S
