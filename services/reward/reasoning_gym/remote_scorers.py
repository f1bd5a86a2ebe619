"""Scores answers by SandboxService, on machines of their own (`penstock serve sandbox`)."""

from __future__ import annotations

import json
from typing import Any

from penstock.rewards import RewardLoadError
from penstock.security import Security
from penstock.v1 import sandbox_pb2
from services.reward.code.remote_cells import SandboxConnection
from services.reward.code.sandboxes.sandbox import SandboxError
from services.reward.reasoning_gym.scorers import Answer

_REASONS = ("limit", "invalid", "failed", "error")


class RemoteScorers:
    """A sandbox service, or several that stand in for each other."""

    def __init__(self, target: str, *, security: Security) -> None:
        """`target` is host:port, several separated by commas."""
        self._connection = SandboxConnection(target, security)

    async def score(self, answer: Answer, *, deadline_s: float) -> dict[str, Any]:
        """See `Scorers.score`."""
        request = sandbox_pb2.ScoreAnswerRequest(
            row_json=json.dumps(answer.row),
            expected=answer.expected,
            given=answer.given.encode("utf-8", "replace").decode(),
        )
        try:
            found = await self._connection.ask(self._connection.stub.ScoreAnswer, request, deadline_s=deadline_s)
        except SandboxError as error:
            return {"error": str(error)}
        if found.HasField("value"):
            return {"value": found.value}
        return {name: text for name in _REASONS if (text := getattr(found, name))}

    async def check(self) -> str:
        """Where answers are scored. Raises RewardLoadError: the package is missing there; and ModelAwayError."""
        found = await self._connection.describe()
        if not found.reasoning_gym_version:
            raise RewardLoadError(
                f"reward 'reasoning_gym': there is no package reasoning-gym at {self._connection.target}, or it serves "
                "programs alone; install the trainer's version there, or set reward.code.sandbox to auto"
            )
        return f"answers are scored at {self._connection.target}, by reasoning_gym {found.reasoning_gym_version}"

    async def probe(self) -> None:
        """Return when it answers. Raises ModelAwayError."""
        await self._connection.describe()

    async def close(self) -> None:
        """Close the channel."""
        await self._connection.close()
