"""Determines a session's reward: stated by the client, or given by the endpoint's reward server."""

from __future__ import annotations

import json
from typing import Any

from penstock.errors import PenstockError
from penstock.network.rpc import call_with_retry, open_channel
from penstock.rewards.score_messages import MAX_METADATA_BYTES, THIRD_PARTY, check_score
from penstock.security import Security
from penstock.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from services.generator.openai.endpoint import Agents
from services.generator.openai.formats.api_errors import ApiError, invalid, unavailable
from services.generator.openai.formats.openai_requests import RewardRequest
from services.generator.openai.sessions.agent_session import Session

SCORE_TIMEOUT_S = 60.0
SCORE_PATIENCE_S = 120.0
CLIENT = "client"
_OK = types_pb2.SCORE_STATUS_OK


class SessionRewards:
    """Ends sessions.

    Args:
        agents: Holds the sessions.
        run_id: The run, for the reward server.
        target: The reward server, host:port or a third party's grpc://host:port; None if clients state rewards.
        security: Credentials of the process.
        judges: Credentials shown to third parties.
    """

    def __init__(
        self, agents: Agents, *, run_id: str, target: str | None, security: Security, judges: Security
    ) -> None:
        self._agents = agents
        self._run_id = run_id
        self._target = target
        self._channel = None
        if target is not None:
            is_third_party = target.startswith(THIRD_PARTY)
            self._channel = open_channel(target.removeprefix(THIRD_PARTY), judges if is_third_party else security)

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def finish(self, session_id: str, body: RewardRequest) -> dict[str, Any]:
        """End a session; returns the response for the client. Raises ApiError."""
        await self._agents.fetch(session_id)
        if body.reward is not None:
            score = types_pb2.Score(status=_OK, value=body.reward, components=body.components, model=CLIENT)
        else:
            session = (await self._agents.groups()).finishable(session_id)
            score = await self._score(session, body)
        status = types_pb2.ScoreStatus.Name(score.status).removeprefix("SCORE_STATUS_").lower()
        if score.status != _OK:
            # As for other samples: a session that could not be judged is dropped and counted, never scored zero.
            await self._agents.drop(session_id, f"reward_{status}")
        else:
            await self._agents.finish(
                session_id, score.value, components=dict(score.components), model=score.model or CLIENT
            )
        return {
            "id": session_id,
            "object": "session.reward",
            "status": status,
            "reward": score.value if score.status == _OK else None,
            "components": dict(score.components),
            "message": score.message,
        }

    async def _score(self, session: Session, body: RewardRequest) -> types_pb2.Score:
        if self._channel is None:
            raise invalid("reward", "required: this endpoint has no reward server (openai.reward)", code="no_reward")
        request = reward_pb2.ScoreRequest(items=[self._item(session, body)])
        try:
            response = await call_with_retry(
                reward_pb2_grpc.RewardServiceStub(self._channel).Score,
                request,
                peer=f"reward server {self._target}",
                timeout_s=SCORE_TIMEOUT_S,
                give_up_after_s=SCORE_PATIENCE_S,
            )
        except PenstockError as error:
            if error.is_retryable:
                raise unavailable(f"the reward server does not answer: {error}", retry_after_s=5.0) from error
            raise ApiError(502, f"the reward server refuses: {error}", code="reward_failed") from error
        problem = "no score" if len(response.scores) != 1 else check_score(response.scores[0])
        if problem:
            raise ApiError(502, f"the reward server's answer is malformed: {problem}", code="reward_failed")
        return response.scores[0]

    def _item(self, session: Session, body: RewardRequest) -> reward_pb2.ScoreItem:
        metadata = json.dumps(body.metadata)
        if len(metadata) > MAX_METADATA_BYTES:
            raise invalid("metadata", f"{len(metadata)} characters as JSON; at most {MAX_METADATA_BYTES}")
        *before, (_, completion) = session.transcript
        last = session.latest
        is_truncated = last is not None and last.sampled.is_truncated
        finish = types_pb2.FINISH_REASON_LENGTH if is_truncated else types_pb2.FINISH_REASON_STOP
        return reward_pb2.ScoreItem(
            key=types_pb2.SampleKey(group_id=session.task),
            messages=[types_pb2.ChatMessage(role=role, content=text) for role, text in before],
            completion_text=completion,
            answer=body.answer,
            metadata_json=metadata,
            finish_reason=finish,
            run_id=self._run_id,
        )
