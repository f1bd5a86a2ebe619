"""What a generator makes of sessions that the broker no longer has for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from services.generator.openai.sessions.agent_session import Session
from services.generator.openai.sessions.kept_sessions import KeptSessions
from services.generator.openai.sessions.metrics import OpenAIMetrics
from services.generator.openai.sessions.session_groups import EXPIRED, MOVED
from services.generator.openai.sessions.stored_session import StoredSession

KEEP_S = 100.0


class Broker:
    """Stores everything, and says what is gone as it is told."""

    def __init__(self) -> None:
        self.has_ended: dict[str, bool] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        """Happens before it says what is gone."""

    async def put(self, session: Any, turns: Sequence[Any], *, first_turn: int, keep_s: float) -> int:
        return first_turn + len(turns)

    async def gone(self, session_ids: Sequence[str]) -> dict[str, bool]:
        self.meanwhile()
        return {name: self.has_ended[name] for name in session_ids if name in self.has_ended}


@pytest.mark.parametrize(
    ("age_s", "has_ended", "reason"), [(KEEP_S, True, EXPIRED), (KEEP_S - 1, True, MOVED), (KEEP_S, False, MOVED)]
)
async def test_a_session_whose_time_was_up_is_told_from_one_that_another_generator_has(
    age_s: float, has_ended: bool, reason: str
) -> None:
    broker, clock = Broker(), ManualClock()
    kept = KeptSessions(
        broker,  # type: ignore[arg-type]
        metrics=OpenAIMetrics(CollectorRegistry()),
        clock=clock,
        adopt_after_s=10.0,
        forget_after_s=KEEP_S,
    )
    for name in ("here", "gone"):
        session = Session(session_id=name, task="t", started_s=0.0, last_used_s=0.0)
        await kept.store(StoredSession(session=session, group="g", reward=None))
    clock.advance(age_s)
    broker.has_ended["gone"] = has_ended
    assert await kept.gone(["here", "gone", "never stored"]) == {"gone": reason}
    assert await kept.gone(["gone"]) == {}


async def test_a_session_that_ends_here_while_the_broker_is_asked_is_no_error() -> None:
    broker, clock = Broker(), ManualClock()
    kept = KeptSessions(
        broker,  # type: ignore[arg-type]
        metrics=OpenAIMetrics(CollectorRegistry()),
        clock=clock,
        adopt_after_s=10.0,
        forget_after_s=KEEP_S,
    )
    session = Session(session_id="gone", task="t", started_s=0.0, last_used_s=0.0)
    await kept.store(StoredSession(session=session, group="g", reward=None))
    broker.has_ended["gone"] = True
    broker.meanwhile = lambda: kept.note_end(["gone"], "put")
    assert await kept.gone(["gone"]) == {"gone": MOVED}
