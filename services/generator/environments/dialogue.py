"""The session of one sample: what its environment answers to each turn, as tokens to give and a score at the end.

    open -> (turn -> answer) x n -> score

A sample that another generator began is resumed from its accepted tokens: the session is opened again and every
recorded turn repeated. An environment that still has the session answers from what it stored; one that lost it plays
the turns again. Either way its answers must be the recorded ones.

Promises:

- Nothing that was given is given again, and nothing stored is changed: an answer that differs from the recorded one
  ends the sample with status ENVIRONMENT_DIVERGED.
- A score is the sum of the turns' rewards; a sample of which no turn has one gets none, and is left to a reward model.
- Whatever an environment does, a session ends after `max_turns` turns.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import TurnConflictError, UnknownSessionError
from penstock.model.model_folder import TextDecoder
from penstock.v1 import broker_pb2, environment_pb2, types_pb2
from penstock.wire.codec import int32_bytes
from penstock.wire.score_rules import is_reward
from penstock.wire.tool_calls import find_tool_calls
from services.generator.environments.client import EnvironmentClient
from services.generator.environments.error_policy import EnvironmentFaultError
from services.generator.environments.rendering import Renderer, UnrenderableError
from services.generator.environments.transcript import Transcript

MAX_REPLAYS = 3
"""Of one session by one generator, in which its environment lost it again and again."""
MAX_TOOL_CALLS = 64
"""Of one turn."""
_MAX_COMPONENTS = 32
_MAX_NAME_CHARACTERS = 64
_MAX_MESSAGE_CHARACTERS = 1024
_OK = (types_pb2.SCORE_STATUS_UNSPECIFIED, types_pb2.SCORE_STATUS_OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an environment made of a turn."""

    given: tuple[int, ...]
    """Tokens that the model reads before its next turn; empty if it has none."""
    is_over: bool
    """Whether no turn follows."""


@dataclass(slots=True)
class _Taken:
    """A turn that was answered."""

    request: environment_pb2.StepRequest
    response: environment_pb2.StepResponse


@dataclass(slots=True)
class _State:
    taken: list[_Taken] = field(default_factory=list)
    opening: environment_pb2.ResetResponse = field(default_factory=environment_pb2.ResetResponse)
    num_replays: int = 0
    renderer: Renderer | None = None


class Dialogue:
    """One sample's session with its environment.

    Args:
        client: The environment.
        render: Makes the sample's conversation, given what the environment says of itself.
        text: Decodes turns.
        lease: The sample.
        run_id: Its run.
        instance_id: Of the run behind that id.
    """

    def __init__(
        self,
        client: EnvironmentClient,
        render: Callable[[environment_pb2.GetEnvironmentResponse], Renderer],
        text: TextDecoder,
        lease: broker_pb2.Lease,
        *,
        run_id: str,
        instance_id: str,
    ) -> None:
        self._client = client
        self._render = render
        self._text = text
        self._prompt = lease.prompt
        key = lease.key
        self.session_id = f"{run_id}/{instance_id}/{key.group_id}/{key.sample_index}/{key.attempt}"
        self._run_id = run_id
        self._state = _State()
        self._wants_token_ids = False
        self._name = ""

    @property
    def num_turns(self) -> int:
        """Turns that were answered."""
        return len(self._state.taken)

    async def open(self, transcript: Transcript, *, is_complete: bool) -> Answer:
        """Open the session, or resume it; returns what is still to be given before the next token is sampled.

        Args:
            transcript: What is recorded of it.
            is_complete: Whether its last turn has ended, so that its answer is due.

        Raises:
            EnvironmentFaultError: The sample ends.
            EnvironmentAwayError: The environment is away.
        """

        async def open_it(is_again: bool) -> Answer:
            self._state = _State()
            return await self._open(transcript, is_complete=is_complete, is_again=is_again)

        return await self._client.errors.carry_out(open_it)

    async def _open(self, transcript: Transcript, *, is_complete: bool, is_again: bool) -> Answer:
        description = await self._client.describe()
        self._wants_token_ids = description.wants_token_ids
        self._name = description.name
        renderer = self._state.renderer = self._render(description)
        # Turns are taken only once their tokens are stored: a session of a sample without tokens is a forgotten one.
        is_new = not transcript.turns and not transcript.opening
        self._state.opening = await self._client.reset(self._reset_request(restarts=is_new or is_again))
        given = await self._rendered(renderer.opening(self._state.opening.messages))
        rest = _rest(given, transcript.opening, is_last=not transcript.turns, where="the opening")
        for number, turn in enumerate(transcript.turns):
            is_last = number == len(transcript.turns) - 1
            if is_last and not turn.given and not is_complete:
                break
            answer = await self._take(turn.sampled, types_pb2.FINISH_REASON_STOP)
            if answer.is_over and not is_last:
                raise _diverged(f"turn {number}: recorded as going on, and now the last one")
            if answer.is_over:
                return answer if not turn.given else _raise(_diverged(f"turn {number}: recorded with an answer"))
            rest = _rest(answer.given, turn.given, is_last=is_last, where=f"the answer to turn {number}")
        return Answer(given=rest, is_over=False)

    async def answer(self, sampled: Sequence[int], reason: types_pb2.FinishReason.ValueType) -> Answer:
        """Take a turn of these tokens, which ended for that reason. Raises as `open`."""

        async def take(is_again: bool) -> Answer:
            if is_again:
                # The session keeps the error that it answered the turn with.
                await self._reopen(restarts=True)
            return await self._take(sampled, reason)

        return await self._client.errors.carry_out(take)

    async def _take(self, sampled: Sequence[int], reason: types_pb2.FinishReason.ValueType) -> Answer:
        turn, text = self.num_turns, self._text.decode(list(sampled))
        request = environment_pb2.StepRequest(
            session_id=self.session_id,
            turn=turn,
            text=text,
            tool_calls=[
                environment_pb2.ToolCall(name=call.name, arguments_json=call.arguments)
                for call in find_tool_calls(text)[1][:MAX_TOOL_CALLS]
            ],
            finish_reason=reason,
            token_ids=int32_bytes(list(sampled)) if self._wants_token_ids else b"",
        )
        response = await self._step(request)
        _check(response)
        self._state.taken.append(_Taken(request, response))
        is_cut_off = reason == types_pb2.FINISH_REASON_LENGTH
        if response.done or is_cut_off or self.num_turns >= self._max_turns:
            return Answer(given=(), is_over=True)
        last = sampled[-1] if sampled else 0
        given = await self._rendered(self._renderer.answer(text, last, response.messages))
        if not given:
            raise _fault(f"turn {turn}: its answer is no token for this model")
        return Answer(given=tuple(given), is_over=False)

    def score(self) -> types_pb2.Score | None:
        """The sum of the turns' rewards; None if none has one."""
        rewards = [taken.response.reward if taken.response.HasField("reward") else None for taken in self._state.taken]
        if all(reward is None for reward in rewards):
            return None
        values = [reward or 0.0 for reward in rewards]
        value = float(sum(values))
        if not is_reward(value):
            return self.fault_score(_fault(f"reward: the turns' sum is {value}"))
        score = types_pb2.Score(
            status=types_pb2.SCORE_STATUS_OK,
            value=value,
            model=self._name[:_MAX_NAME_CHARACTERS],
            turn_values=np.asarray(values, "<f4").tobytes(),
        )
        for taken in self._state.taken:
            for name, part in taken.response.components.items():
                key = name[:_MAX_NAME_CHARACTERS]
                if key in score.components or len(score.components) < _MAX_COMPONENTS:
                    score.components[key] += part
        return score

    def fault_score(self, error: EnvironmentFaultError) -> types_pb2.Score:
        """What the sample ends with after an error."""
        status = error.status if error.status in types_pb2.ScoreStatus.values() else types_pb2.SCORE_STATUS_FAILED
        return types_pb2.Score(
            status=status, message=str(error)[:_MAX_MESSAGE_CHARACTERS], model=self._name[:_MAX_NAME_CHARACTERS]
        )

    async def close(self) -> None:
        """End the session, once its sample's end is stored."""
        await self._client.close(self.session_id)

    @property
    def _renderer(self) -> Renderer:
        if self._state.renderer is None:
            raise ValueError("open the session first")
        return self._state.renderer

    @property
    def _max_turns(self) -> int:
        most = self._client.limits.max_turns
        return min(most, self._state.opening.max_turns) if self._state.opening.max_turns else most

    async def _step(self, request: environment_pb2.StepRequest) -> environment_pb2.StepResponse:
        while True:
            try:
                return await self._client.step(request)
            except UnknownSessionError:
                await self._replay(restarts=False)
            except TurnConflictError as error:
                if self._state.num_replays >= MAX_REPLAYS:
                    raise _fault(str(error)) from error
                await self._replay(restarts=True)

    async def _replay(self, *, restarts: bool) -> None:
        """Open the session again and take every turn so far; answers must be as they were."""
        self._state.num_replays += 1
        if self._state.num_replays > MAX_REPLAYS:
            raise _fault(f"the session was lost {MAX_REPLAYS} times; sessions must survive until they are closed")
        await self._reopen(restarts=restarts)

    async def _reopen(self, *, restarts: bool) -> None:
        opening = await self._client.reset(self._reset_request(restarts=restarts))
        if opening != self._state.opening:
            raise _diverged("the opening differs from the recorded one")
        for taken in self._state.taken:
            try:
                response = await self._client.step(taken.request)
            except (UnknownSessionError, TurnConflictError):
                await self._replay(restarts=True)
                return
            _check(response)
            if response != taken.response:
                raise _diverged(f"turn {taken.request.turn}: its answer differs from the recorded one")

    def _reset_request(self, *, restarts: bool) -> environment_pb2.ResetRequest:
        prompt = self._prompt
        has_seed = prompt.sampling.HasField("seed")
        return environment_pb2.ResetRequest(
            session_id=self.session_id,
            seed=prompt.sampling.seed if has_seed else zlib.crc32(prompt.group_id.encode()),
            prompt_text=prompt.text,
            messages=prompt.messages,
            answer=prompt.answer,
            metadata_json=prompt.metadata_json,
            purpose=prompt.purpose,
            run_id=self._run_id,
            restarts=restarts,
        )

    async def _rendered(self, rendering: Awaitable[list[int]]) -> list[int]:
        try:
            return await rendering
        except UnrenderableError as error:
            raise _fault(str(error)) from error


def _rest(given: Sequence[int], recorded: Sequence[int], *, is_last: bool, where: str) -> tuple[int, ...]:
    """What is still to be given; only of the last answer a part may be missing. Raises EnvironmentFaultError."""
    known = tuple(given[: len(recorded)]) if is_last else tuple(given)
    if known != tuple(recorded):
        raise _diverged(f"{where} differs from the recorded one")
    return tuple(given[len(recorded) :])


def _check(response: environment_pb2.StepResponse) -> None:
    if response.status not in _OK:
        message = response.message or "the environment gave no reason"
        raise EnvironmentFaultError(message, status=response.status)


def _diverged(message: str) -> EnvironmentFaultError:
    return EnvironmentFaultError(message, status=types_pb2.SCORE_STATUS_ENVIRONMENT_DIVERGED)


def _fault(message: str) -> EnvironmentFaultError:
    return EnvironmentFaultError(message, status=types_pb2.SCORE_STATUS_ENVIRONMENT_ERROR)


def _raise(error: EnvironmentFaultError) -> Answer:
    raise error
