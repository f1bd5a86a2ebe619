"""Decodes a sample turn by turn, with its environment's answers between the turns.

    in a slot: decode a turn -> outside: its tokens stored -> environment -> in a slot again: its answer, the next turn

Promises:

- An environment sees a turn only once the broker has its tokens: the next holder of the sample gets them, too.
- While a sample waits for its environment it takes no slot of the engine.
- Tokens that the environment gave are marked as given, and count against the sample's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from penstock.v1 import types_pb2
from services.generator.engine.engine import FinishReason, GenerateRequest
from services.generator.environments.dialogue import Dialogue
from services.generator.environments.error_policy import EnvironmentFaultError
from services.generator.environments.transcript import Transcript

_REASONS = {FinishReason.STOP: types_pb2.FINISH_REASON_STOP, FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH}
End = tuple[FinishReason, types_pb2.Score | None]
"""Why a sample ended, and its score, if its environment gave one."""


class Conversing(Protocol):
    """What a conversation needs of the sample that holds it."""

    async def decode(self, request: GenerateRequest) -> tuple[list[int], FinishReason]:
        """Decode a turn, inside a slot; its tokens are on their way to the broker."""

    def give(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment, before the turn that reads them."""

    async def stored(self) -> None:
        """Wait until the broker has all tokens."""

    def leave_slot(self) -> None:
        """Give the engine's slot up."""

    async def enter_slot(self) -> None:
        """Wait for a slot of the engine."""


async def converse(
    sample: Conversing, dialogue: Dialogue, request: GenerateRequest, transcript: Transcript, *, max_model_len: int
) -> End:
    """Decode a sample to its end. Raises EnvironmentAwayError, and what `decode` raises.

    Args:
        sample: It is in a slot.
        dialogue: Its session, not open yet.
        request: The sample as the broker leased it, `transcript` in its prefix.
        transcript: What is recorded of the session.
        max_model_len: The engine's context, tokens.
    """
    tokens = list(request.prefix_token_ids)
    most = min(request.sampling.max_new_tokens, max_model_len - len(request.prompt_token_ids))
    last = transcript.turns[-1] if transcript.turns else None
    turn = list(last.sampled) if last is not None and not last.given else []
    sample.leave_slot()
    try:
        is_complete = bool(turn) and turn[-1] in request.sampling.stop_token_ids
        answer = await dialogue.open(transcript, is_complete=is_complete)
        while True:
            is_full = len(tokens) + len(answer.given) >= most
            if is_full and turn and not (answer.is_over or answer.given):
                # Another generator decoded the turn to its limit, and no more.
                await dialogue.answer(turn, types_pb2.FINISH_REASON_LENGTH)
            if is_full or answer.is_over:
                return FinishReason.STOP if answer.is_over else FinishReason.LENGTH, dialogue.score()
            if answer.given:
                sample.give(answer.given)
                tokens += answer.given
                turn = []
            await sample.enter_slot()
            sampled, reason = await sample.decode(_turn_request(request, tokens, turn, number=dialogue.num_turns))
            if reason is FinishReason.ABORTED:
                return reason, None
            tokens += sampled
            turn += sampled
            sample.leave_slot()
            await sample.stored()
            answer = await dialogue.answer(turn, _REASONS[reason])
            if reason is FinishReason.LENGTH:
                return reason, dialogue.score()
    except EnvironmentFaultError as error:
        return FinishReason.STOP, dialogue.fault_score(error)


def _turn_request(
    request: GenerateRequest, tokens: Sequence[int], turn: Sequence[int], *, number: int
) -> GenerateRequest:
    """The engine's request for a turn, of which `turn` is decoded already: all that came before it is its prompt."""
    num_before = len(tokens) - len(turn)
    return replace(
        request,
        request_id=f"{request.request_id}:{number}",
        prompt_token_ids=(*request.prompt_token_ids, *tokens[:num_before]),
        prefix_token_ids=tuple(turn),
        sampling=replace(
            request.sampling,
            max_new_tokens=request.sampling.max_new_tokens - num_before,
            seed=request.sampling.seed_after(num_before),
        ),
    )
