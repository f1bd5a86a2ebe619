"""What endpoints know to be true of agents' sessions at the broker: whose each is, its turns, and how many have ended.

An independent model of `sessions.proto`. Where an answer was lost, or time decides, several states of a session are
allowed; what the broker is then seen to have must be one of them, and is the state from there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.broker.records.run_clock import Reading

PUT, EXPIRED = "put", "expired"
SLACK_S = 1.5
"""Brokers read the run's clock now and then, and look for what has expired a few times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A session at the broker."""

    owner: str
    """Empty once a process said that it replaces the owner."""
    task: str
    is_named: bool
    turns: tuple[int, ...]
    """The one token that each sampled, unlike any other."""
    reward: float | None
    put_s: float
    """When it was stored last, by the run's clock, give or take SLACK_S."""
    keep_s: float

    def left_s(self, clock: Reading) -> float:
        """Seconds until its time is up, give or take SLACK_S: it begins again at the end of a gap."""
        return max(self.put_s, clock.unbroken_since_s) + self.keep_s - clock.heard_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A session that the broker counted and forgot."""

    outcome: str


@dataclass(slots=True)
class SessionLedger:
    """See the module."""

    kept: dict[str, Kept] = field(default_factory=dict)
    num_opened: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """By outcome."""
    _allowed: dict[str, list[Kept | Ended]] = field(default_factory=dict)

    def allow(self, session_id: str, *states: Kept | Ended) -> None:
        """From now on the session may be in one of these states, too."""
        self._allowed.setdefault(session_id, []).extend(states)

    def move(self, session_id: str, state: Kept | Ended) -> None:
        """The session is in this state now."""
        before = self.kept.pop(session_id, None)
        if isinstance(state, Ended):
            assert before is not None, f"{session_id} ended, and was not there"
            self.ended[state.outcome] += 1
        else:
            self.num_opened += before is None
            self.kept[session_id] = state

    def release(self, owner: str) -> None:
        """A process has, or will have said that it replaces this one."""
        for session_id, kept in self.kept.items():
            if kept.owner == owner:
                self.allow(session_id, changed(kept, owner=""))

    def end_all(self, outcome: str) -> None:
        """The run ended."""
        self._allowed.clear()
        for session_id in list(self.kept):
            self.move(session_id, Ended(outcome=outcome))

    def see(self, found: Mapping[str, tuple[str, int, float | None]], clock: Reading, *, before_gap: Reading) -> None:
        """Settle what is unsure: the broker has these sessions, with their owners, numbers of turns and rewards."""
        for session_id in {*self.kept, *found, *self._allowed}:
            before, seen = self.kept.get(session_id), found.get(session_id)
            states = [*([] if before is None else [before]), *self._allowed.pop(session_id, ())]
            if seen is not None:
                fitting = [each for each in states if isinstance(each, Kept) and _shown(each) == seen]
                assert fitting, f"{session_id}: the broker has {seen}, and not one of {states}"
                assert fitting[-1].left_s(clock) > -SLACK_S, f"{session_id}: its time is up, {fitting[-1]}, {clock}"
                if fitting[-1] != before:
                    self.move(session_id, fitting[-1])
            elif before is not None:
                self._note_gone(session_id, states, clock, before_gap)

    def _note_gone(
        self, session_id: str, states: Collection[Kept | Ended], clock: Reading, before_gap: Reading
    ) -> None:
        endings = [each for each in states if isinstance(each, Ended)]
        if not endings:
            kept = [each for each in states if isinstance(each, Kept)]
            is_late = any(each.left_s(at) < SLACK_S for each in kept for at in (clock, before_gap))
            assert is_late, f"{session_id} is gone: {states}, {clock}"
            endings = [Ended(outcome=EXPIRED)]
        self.move(session_id, endings[0])


def changed(
    kept: Kept, *, owner: str | None = None, turns: tuple[int, ...] | None = None, put_s: float | None = None
) -> Kept:
    """The same session with another owner, turns or time."""
    return Kept(
        owner=kept.owner if owner is None else owner,
        task=kept.task,
        is_named=kept.is_named,
        turns=kept.turns if turns is None else turns,
        reward=kept.reward,
        put_s=kept.put_s if put_s is None else put_s,
        keep_s=kept.keep_s,
    )


def _shown(kept: Kept) -> tuple[str, int, float | None]:
    return kept.owner, len(kept.turns), kept.reward
