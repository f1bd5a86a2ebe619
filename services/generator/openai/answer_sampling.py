"""Collects one answer from the engine: its tokens, their text, and its end at a stop string."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from penstock.wire.routes import Routes
from penstock.wire.tool_calls import OPENING, ToolCall, find_tool_calls
from services.generator.engine.engine import FinishReason, GenerateRequest, TokenSpan
from services.generator.openai.formats.chat_template import ConversationTokenizer
from services.generator.openai.sessions.agent_session import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What can be shown beyond the last piece."""

    text: str
    tokens: list[tuple[int, float]]
    """Tokens sampled since then, with log-probs in nats."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """A whole answer."""

    sampled: Sampled
    text: str
    """Text without the end token, up to the stop string."""
    unsaid: str
    """Text of sampled tokens that `text` omits."""
    num_shown: int
    """Characters of `text` already shown."""
    shown_tokens: list[tuple[int, float]]
    """Tokens with log-probs, except an end token."""
    content: str
    """`text` without tool calls, if those were parsed."""
    tool_calls: list[ToolCall]
    """Tools to call, in order."""

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish reason."""
        if self.sampled.is_truncated:
            return "length"
        return "tool_calls" if self.tool_calls else "stop"


class AnswerAbortedError(Exception):
    """The engine gave the sample up because it is stopping."""


async def take_answer(
    spans: AsyncGenerator[TokenSpan, None],
    request: GenerateRequest,
    *,
    tokenizer: ConversationTokenizer,
    stops: tuple[str, ...],
    emit: Callable[[Piece], Awaitable[None]],
    finds_tools: bool,
    run_history: Callable[[], int],
) -> Answer:
    """Collect a sample up to its end or its first stop string.

    Args:
        spans: Output of the engine; closed early if a stop string ends the answer, which aborts the sample.
        request: The request to the engine.
        tokenizer: Decodes the tokens.
        stops: Strings that end the answer and are not shown.
        emit: Called with each piece that can be shown; while it awaits, decoding is held back.
        finds_tools: Whether to parse tool calls; from the first one on, nothing is shown before the end.
        run_history: The history counter of the loaded weights.

    Raises:
        AnswerAbortedError: The engine stopped before the answer ended.
    """
    end_ids = frozenset(request.sampling.stop_token_ids)
    draft = _Draft(tokenizer, end_ids=end_ids, stops=stops, markers=(OPENING,) if finds_tools else ())
    num_prompt_rows = len(request.prompt_token_ids) - 1
    history: int | None = None
    reason: FinishReason | None = None
    async with aclosing(spans) as following:
        async for span in following:
            history = run_history() if history is None else history
            for token_id, logprob in zip(span.token_ids.tolist(), span.logprobs.tolist(), strict=True):
                draft.add(token_id, logprob, span.policy_version)
                if draft.is_stopped:
                    break
            if span.routes is not None:
                draft.routes.append(span.routes)
            reason = FinishReason.STOP if draft.is_stopped else span.finish_reason
            piece = draft.take_piece()
            if piece.text or piece.tokens:
                await emit(piece)
            if draft.is_stopped:
                break
    if reason is None or reason is FinishReason.ABORTED or not draft.token_ids:
        raise AnswerAbortedError("the engine gave the sample up")
    is_truncated = reason is FinishReason.LENGTH
    return draft.answer(is_truncated=is_truncated, run_history=history or 0, num_prompt_rows=num_prompt_rows)


@dataclass(slots=True)
class _Draft:
    tokenizer: ConversationTokenizer
    end_ids: frozenset[int]
    stops: tuple[str, ...]
    markers: tuple[str, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)
    text: str = ""
    is_stopped: bool = False
    _cut: int = 0
    _num_shown: int = 0
    _num_shown_tokens: int = 0
    _step: Callable[[int], str] | None = None

    def add(self, token_id: int, logprob: float, version: int) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token_id in self.end_ids:
            return
        if self._step is None:
            self._step = self.tokenizer.stream()
        before = len(self.text)
        self.text += self._step(token_id)
        found = [at for stop in self.stops if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            self.is_stopped, self._cut = True, min(found)

    def take_piece(self) -> Piece:
        end = self._cut if self.is_stopped else len(self.text) - self._num_held_back()
        end = max(end, self._num_shown)
        text, self._num_shown = self.text[self._num_shown : end], end
        num_before, self._num_shown_tokens = self._num_shown_tokens, len(self.token_ids)
        return Piece(text=text, tokens=self._shown_tokens(num_before))

    def _num_held_back(self) -> int:
        """Number of characters at the end that may have to be hidden."""
        for marker in self.markers:
            at = self.text.find(marker)
            if at >= 0:
                return len(self.text) - at
        return max((_overlap(self.text, end) for end in (*self.stops, *self.markers)), default=0)

    def answer(self, *, is_truncated: bool, run_history: int, num_prompt_rows: int) -> Answer:
        is_ended = self.token_ids[-1] in self.end_ids
        text, unsaid = self.text, ""
        if self.is_stopped:
            text, unsaid = self.text[: self._cut], self.text[self._cut :]
        else:
            # Bytes buffered as an incomplete character stay incomplete.
            body = self.token_ids[:-1] if is_ended else self.token_ids
            whole = self.tokenizer.text_of(body)
            text = whole if whole.startswith(self.text) else self.text
            unsaid = self.tokenizer.raw_text_of(self.token_ids[-1:]) if is_ended else ""
        content, calls = find_tool_calls(text) if self.markers else (text, [])
        return Answer(
            sampled=Sampled(
                token_ids=np.asarray(self.token_ids, np.int32),
                logprobs=np.asarray(self.logprobs, np.float32),
                versions=np.asarray(self.versions, np.int64),
                is_truncated=is_truncated,
                run_history=run_history,
                # Beyond a stop string tokens are left out.
                routes=np.concatenate(self.routes)[: num_prompt_rows + len(self.token_ids)] if self.routes else None,
            ),
            text=text,
            unsaid=unsaid,
            num_shown=self._num_shown,
            shown_tokens=self._shown_tokens(0),
            content=content,
            tool_calls=calls,
        )

    def _shown_tokens(self, start: int) -> list[tuple[int, float]]:
        pairs = zip(self.token_ids[start:], self.logprobs[start:], strict=True)
        return [(token_id, logprob) for token_id, logprob in pairs if token_id not in self.end_ids]


def _overlap(text: str, end: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `end`."""
    most = min(len(text), len(end) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(end[:size])), 0)
