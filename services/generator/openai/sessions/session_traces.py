"""Records the spans of agents' sessions once they have ended: the broker, which gets finished groups, knows no times.

    rl.group                 the first session's begin ... put; the step that it is trained in links to its samples
      rl.sample              a trajectory: its session's begin ... put; or a session that was dropped, without a key
        rl.sample.turn       a request of the session; links to the span of the agent that made it

Groups are sampled as those of prompts, by their ids. Of sessions that are not, those that were dropped are recorded,
within the budget of `penstock.tracing.tail`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock import tracing
from penstock.clock import Clock
from penstock.tracing import Span, TraceContext, read_traceparent, sample_context
from penstock.tracing.recording import Value, new_context, ratio
from penstock.tracing.tail import TailBudget
from penstock.v1 import types_pb2
from services.generator.openai.sessions.agent_session import Session, Turn
from services.generator.openai.sessions.session_groups import MOVED, SHUTDOWN


class SessionTraces:
    """Records for one run, in one process.

    Args:
        run_id: The run.
        clock: That of the sessions' times.
    """

    def __init__(self, run_id: str, clock: Clock) -> None:
        self._run_id = run_id
        self._clock = clock
        self._epoch_s = clock.now_s() - clock.monotonic_s()
        self._budget = TailBudget()

    def traceparent(self, group_id: str) -> str:
        """What goes with a group that is sampled; empty for one that is not."""
        share = ratio()
        return tracing.traceparent_of(self._run_id, group_id, share) if share else ""

    def record_put(self, group: types_pb2.TrajectoryGroup, sessions: Sequence[Session]) -> None:
        """A group was put, of these sessions, one for each of its trajectories."""
        root = read_traceparent(group.prompt.traceparent)
        if root is None or not tracing.is_on():
            return
        begun_s = min(map(_begun_s, sessions))
        attributes: dict[str, Value] = {"rl.group.id": group.prompt.group_id, "rl.group.size": len(sessions)}
        self._record("rl.group", begun_s, root, None, attributes | {"rl.purpose": "train"})
        seen: set[str] = set()
        for trajectory, session in zip(group.trajectories, sessions, strict=True):
            key = trajectory.key
            span = sample_context(root, key.sample_index, key.attempt)
            name = f"{key.group_id}/{key.sample_index}"
            attributes = {
                "rl.sample.key": name,
                "rl.session": session.session_id,
                "rl.sample.tokens": len(trajectory.token_ids) // 4,
                "rl.policy.min_version": trajectory.min_policy_version,
                "rl.policy.max_version": trajectory.max_policy_version,
                "rl.score": trajectory.score.value,
            }
            self._record("rl.sample", _begun_s(session), span, root, attributes)
            # Branches of one session share turns.
            if session.session_id not in seen:
                seen.add(session.session_id)
                self._record_turns(session, span, {"rl.sample.key": name})

    def record_dropped(self, session: Session, group_id: str, reason: str) -> None:
        """A session was dropped; one that goes on elsewhere is recorded there."""
        if reason in (MOVED, SHUTDOWN) or not tracing.is_on():
            return
        root = read_traceparent(self.traceparent(group_id))
        self._budget.earn(self._clock.monotonic_s())
        if root is None and not self._budget.affords(1):
            return
        span = new_context(tracing.group_context(self._run_id, group_id))
        name: dict[str, Value] = {"rl.session": session.session_id, "rl.group.id": group_id}
        self._record("rl.sample", _begun_s(session), span, root, name, error=reason)
        self._record_turns(session, span, {})

    def _record_turns(self, session: Session, parent: TraceContext, name: dict[str, Value]) -> None:
        for number, turn in enumerate(session.turns):
            attributes: dict[str, Value] = {
                **name,
                "rl.session": session.session_id,
                "rl.turn": number,
                "rl.turn.given_tokens": len(turn.given_token_ids),
                "rl.turn.tokens": len(turn.sampled.token_ids),
                "rl.policy.version": int(turn.sampled.versions[-1]),
            }
            if turn.begun_s:
                span = new_context(parent)
                self._record("rl.sample.turn", turn.begun_s, span, parent, attributes, turn=turn)

    def _record(
        self,
        name: str,
        begun_s: float,
        context: TraceContext,
        parent: TraceContext | None,
        attributes: dict[str, Value],
        *,
        turn: Turn | None = None,
        error: str = "",
    ) -> None:
        """A span up to now, or to the turn's end; times are by the sessions' clock."""
        end_s = self._clock.monotonic_s() if turn is None else turn.ended_s
        caller = read_traceparent(turn.caller) if turn is not None and turn.caller else None
        tracing.record(
            Span(
                name=name,
                run_id=self._run_id,
                start_s=self._epoch_s + begun_s,
                end_s=self._epoch_s + end_s,
                context=context,
                parent=parent,
                attributes=attributes,
                links=[caller] if caller is not None else [],
                error=error,
            )
        )


def _begun_s(session: Session) -> float:
    """When it began, with what its first request waited for before it was admitted."""
    return min([session.started_s, *(turn.begun_s for turn in session.turns if turn.begun_s)])
