"""Tracks sessions until they are put: open, finished, waiting for their siblings. Pure: callers pass the time.

    request -> open -> finished (has a reward) -> its group is complete, or its time is up -> taken, to be put
                 |                                    |
                 +--> dropped: idle, abandoned,       +--> dropped: group_incomplete
                      reward_*

Sessions of one task make a group, in the order in which they began; one beyond the group's size begins another.
Promises: a session is in one group; sessions are bounded in number and bytes; drops are counted by reason.
"""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.generator.config import OpenAIConfig
from services.generator.openai.formats.api_errors import ApiError, unavailable
from services.generator.openai.sessions.agent_session import Session
from services.generator.openai.sessions.stored_session import Reward, StoredSession

MAX_SESSION_BYTES = 16 * 1024 * 1024
MAX_HELD_BYTES = 512 * 1024 * 1024
MAX_TURNS = 512
"""Maximum number of turns of one session."""
MAX_REMEMBERED = 10_000
"""Number of finished sessions that are remembered as finished."""
RETRY_AFTER_S = 2.0
SHUTDOWN = "shutdown"
"""Why a session is dropped that may go on elsewhere, as this process stops."""
MOVED = "moved"
"""Why a session is dropped that another generator has by now, and that may come back."""
EXPIRED = "expired"
"""Why a session is left out that the broker has given up meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished:
    """A session with its reward."""

    session: Session
    reward: float
    components: dict[str, float]
    """Named parts of the reward."""
    model: str
    """Source of the reward."""
    finish_s: float
    """Time of the end, by the clock of the session's other times."""


@dataclass(slots=True, kw_only=True, eq=False)
class SessionGroup:
    """Sessions that are trained on together."""

    task: str
    name: str
    """Unlike any other group's, in any process."""
    open_ids: set[str] = field(default_factory=set)
    """Members still open."""
    finished: list[Finished] = field(default_factory=list)
    """Finished members."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.open_ids) + len(self.finished)

    @property
    def group_id(self) -> str:
        """Its id in the run."""
        return f"agent-{self.name}-{self.task}"


class SessionGroups:
    """All sessions of one endpoint.

    Args:
        config: Limits on the number and age of sessions.
        group_size: Sessions that make a group.
    """

    def __init__(self, config: OpenAIConfig, *, group_size: int) -> None:
        self._config = config
        self._instance = uuid.uuid4().hex[:8]
        self._group_size = group_size
        self.dropped: Counter[str] = Counter()
        """Sessions dropped, by reason."""
        self.on_dropped: Callable[[Session, str, str], None] = lambda session, group_id, reason: None
        """Called with each of them, the id of its group and the reason."""
        self._open: dict[str, Session] = {}
        self._groups: dict[str, SessionGroup] = {}
        """The group of each open session, and the newest group of each task."""
        self._newest: dict[str, SessionGroup] = {}
        self._waiting: list[SessionGroup] = []
        """Groups with a finished member, in the order of their first one."""
        self._ready: deque[SessionGroup] = deque()
        self._over: OrderedDict[str, float | None] = OrderedDict()
        self._num_groups = 0
        self._is_closed = False
        self._ended: list[tuple[str, str]] = []
        """Sessions dropped for good since they were last asked for, with the reason."""
        self._regrouped: list[Session] = []
        """Sessions that joined another group since then."""

    @property
    def is_closed(self) -> bool:
        """Whether the process stops."""
        return self._is_closed

    @property
    def num_open(self) -> int:
        """Number of open sessions."""
        return len(self._open)

    @property
    def num_held(self) -> int:
        """Number of sessions that are open, wait for their siblings, or wait to be put."""
        return len(self._open) + sum(len(group.finished) for group in (*self._waiting, *self._ready))

    @property
    def num_groups(self) -> int:
        """Groups that have members here."""
        return len({id(group) for group in (*self._groups.values(), *self._waiting, *self._ready)})

    def begins_group(self, session_id: str, task: str) -> bool:
        """Whether this session is new, and the first of a group."""
        newest = self._newest.get(task)
        return session_id not in self._open and (newest is None or newest.size >= self._group_size)

    def find(self, session_id: str) -> Session | None:
        """An open session; None for a new one. Raises ApiError for one that has ended, and after shutdown."""
        if self._is_closed:
            raise unavailable("the generator shuts down; sessions that were open are over")
        if session_id in self._over:
            raise ApiError(400, f"session {session_id!r} is over; choose another id", code="session_over")
        return self._open.get(session_id)

    def enter(self, session_id: str, task: str, now_s: float) -> Session:
        """The session, started if new, with one more request; raises ApiError if there is no capacity."""
        session = self.find(session_id)
        if session is None:
            session = self._begin(session_id, task, now_s)
        elif len(session.turns) >= MAX_TURNS or session.num_bytes >= MAX_SESSION_BYTES:
            raise ApiError(
                400,
                f"session {session_id!r} has {len(session.turns)} turns and takes {session.num_bytes} bytes; at most "
                f"{MAX_TURNS} turns, or {MAX_SESSION_BYTES} bytes: finish it",
                code="session_too_long",
            )
        session.num_active += 1
        session.last_used_s = now_s
        return session

    def leave(self, session: Session, now_s: float) -> None:
        """Record that a request was answered or failed; a session of failed ones alone is as if never begun."""
        session.num_active -= 1
        session.last_used_s = now_s
        if not session.num_active and not session.turns and self._open.get(session.session_id) is session:
            self._take_out(session.session_id)

    def finish(self, session_id: str, reward: float, now_s: float, *, components: dict[str, float], model: str) -> bool:
        """Give a session its reward, which ends it; returns whether this was the first time. Raises ApiError."""
        if session_id in self._over and self._over[session_id] == reward:
            return False
        session = self.finishable(session_id)
        group = self._groups.pop(session_id)
        del self._open[session_id]
        group.open_ids.discard(session_id)
        self._add_finished(group, session, Reward(value=reward, components=components, model=model, finish_s=now_s))
        return True

    def finishable(self, session_id: str) -> Session:
        """The session, if it may end now; raises ApiError."""
        session = self.find(session_id)
        if session is None:
            raise ApiError(404, f"no session {session_id!r} here", code="unknown_session")
        if session.num_active:
            raise ApiError(400, f"session {session_id!r} is being answered; finish it afterwards", code="session_busy")
        if not session.turns:
            raise ApiError(400, f"session {session_id!r} has no turn to reward; drop it", code="session_empty")
        if session.latest is None:
            raise ApiError(
                400,
                f"session {session_id!r} has no answer that its client took; ask again, or drop it",
                code="session_empty",
            )
        return session

    def knows(self, session_id: str, task: str) -> bool:
        """Whether the session is here, or was, or sessions of its task are; an empty task is none."""
        return session_id in self._open or session_id in self._over or bool(task and task in self._newest)

    def is_over(self, session_id: str) -> bool:
        """Whether the session has ended here."""
        return session_id in self._over

    def stored(self, session: Session, reward: Reward | None = None) -> StoredSession | None:
        """An open session, for the broker, with the `reward` that it is about to get; None if it is over."""
        group = self._groups.get(session.session_id)
        return None if group is None else StoredSession(session=session, group=group.name, reward=reward)

    def restore(self, copies: Sequence[StoredSession]) -> None:
        """Go on with sessions of another generator, in their groups; those that are known here are left out."""
        found = {group.name: group for group in (*self._groups.values(), *self._waiting)}
        # A group without a finished member may have been put before these joined it: its name would be a repetition.
        lasting = {copy.group for copy in copies if copy.reward is not None} | found.keys()
        for copy in sorted(copies, key=lambda each: 0.0 if each.reward is None else each.reward.finish_s):
            session = copy.session
            if session.session_id in self._open or session.session_id in self._over:
                continue
            group = found.get(copy.group)
            if group is None:
                name = copy.group if copy.group in lasting else self._new_name()
                group = found[copy.group] = SessionGroup(task=session.task, name=name)
            if copy.reward is None:
                self._open[session.session_id] = session
                self._groups[session.session_id] = group
                group.open_ids.add(session.session_id)
            else:
                self._add_finished(group, session, copy.reward)
            if group.size < self._group_size:
                self._newest[session.task] = group

    def drop(self, session_id: str, reason: str) -> bool:
        """Give an open session up; returns whether it existed."""
        if session_id not in self._open:
            return False
        session, group = self._take_out(session_id)
        if reason != MOVED:
            self._remember(session_id, None)
        if reason not in (MOVED, SHUTDOWN):
            self._ended.append((session_id, reason))
        self.dropped[reason] += 1
        self.on_dropped(session, group.group_id, reason)
        return True

    def _take_out(self, session_id: str) -> tuple[Session, SessionGroup]:
        """Take an open session out of its group, and its task's group away with its last member."""
        session, group = self._open.pop(session_id), self._groups.pop(session_id)
        group.open_ids.discard(session_id)
        if not group.size and self._newest.get(group.task) is group:
            del self._newest[group.task]
        return session, group

    def expire(self, now_s: float) -> None:
        """Drop idle sessions, and close groups that have waited too long."""
        idle = [
            s for s in self._open.values() if not s.num_active and now_s - s.last_used_s > self._config.session_idle_s
        ]
        for session in idle:
            self.drop(session.session_id, "idle")
        for group in list(self._waiting):
            if now_s - group.finished[0].finish_s > self._config.group_timeout_s:
                self._close(group)

    def close_all(self) -> None:
        """Accept no more requests: groups that are complete enough become ready to put, the rest is dropped."""
        self._is_closed = True
        for session_id in list(self._open):
            self.drop(session_id, SHUTDOWN)
        for group in list(self._waiting):
            self._close(group)

    def take_ended(self) -> dict[str, list[str]]:
        """Sessions dropped for good since the last call, by reason; those that may go on elsewhere are left out."""
        found: dict[str, list[str]] = {}
        for session_id, reason in self._ended:
            found.setdefault(reason, []).append(session_id)
        self._ended = []
        return found

    def take_regrouped(self) -> list[Session]:
        """Sessions that joined another group since the last call."""
        found, self._regrouped = self._regrouped, []
        return found

    def take(self) -> SessionGroup | None:
        """Take the next group to put."""
        return self._ready.popleft() if self._ready else None

    def _begin(self, session_id: str, task: str, now_s: float) -> Session:
        if self.num_held >= self._config.max_sessions:
            raise ApiError(
                429,
                f"{self.num_held} sessions are open or wait for their siblings; at most {self._config.max_sessions}",
                code="too_many_sessions",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.held_bytes() >= MAX_HELD_BYTES:
            raise ApiError(429, "the sessions held here have no more room", code="no_room", retry_after_s=RETRY_AFTER_S)
        session = Session(session_id=session_id, task=task, started_s=now_s, last_used_s=now_s)
        self._open[session_id] = session
        self._join(session)
        return session

    def held_bytes(self) -> int:
        """Approximate memory of all sessions."""
        waiting = (done.session for group in (*self._waiting, *self._ready) for done in group.finished)
        return sum(session.num_bytes for session in (*self._open.values(), *waiting))

    def _join(self, session: Session) -> None:
        group = self._newest.get(session.task)
        if group is None or group.size >= self._group_size:
            group = self._newest[session.task] = SessionGroup(task=session.task, name=self._new_name())
        group.open_ids.add(session.session_id)
        self._groups[session.session_id] = group

    def _new_name(self) -> str:
        self._num_groups += 1
        return f"{self._instance}-{self._num_groups}"

    def _close(self, group: SessionGroup) -> None:
        """Close a group to new members; those still open begin another."""
        self._waiting.remove(group)
        if self._newest.get(group.task) is group:
            del self._newest[group.task]
        for session_id in sorted(group.open_ids):
            self._join(self._open[session_id])
            self._regrouped.append(self._open[session_id])
        group.open_ids.clear()
        # A single sample has nothing to be compared with.
        if len(group.finished) >= min(2, self._group_size):
            self._ready.append(group)
        else:
            self.dropped["group_incomplete"] += len(group.finished)
            for done in group.finished:
                self.on_dropped(done.session, group.group_id, "group_incomplete")
            if not self._is_closed:
                self._ended += [(done.session.session_id, "group_incomplete") for done in group.finished]

    def _add_finished(self, group: SessionGroup, session: Session, reward: Reward) -> None:
        self._remember(session.session_id, reward.value)
        if not group.finished:
            self._waiting.append(group)
        group.finished.append(
            Finished(
                session=session,
                reward=reward.value,
                components=reward.components,
                model=reward.model,
                finish_s=reward.finish_s,
            )
        )
        if len(group.finished) >= self._group_size:
            self._close(group)

    def _remember(self, session_id: str, reward: float | None) -> None:
        self._over[session_id] = reward
        while len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)
