"""Answers requests without HTTP: turns a request into tokens, and its answer into a turn of the session.

    request -> which turn does it continue? -> exact tokens -> a slot in the engine -> answer -> turn of the session

Promises:
- A turn is recorded once its answer is complete, never before: a request that fails, or whose client disconnects
  meanwhile, leaves its session unchanged, so that a retry continues from the same tokens. It is recorded before its
  last part is sent, since the client may continue at once; if the client disconnects then, the turn is not trained on.
- Requests without a session are answered like the others and leave no state.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.tracing import current
from services.generator.config import OpenAIConfig
from services.generator.decoding.unleased import UnleasedSamples
from services.generator.engine.engine import FinishReason, GenerateRequest, SamplingSettings, TokenSpan
from services.generator.openai.answer_sampling import Answer, Piece, take_answer
from services.generator.openai.formats.api_errors import ApiError, invalid, unavailable
from services.generator.openai.formats.chat_template import ConversationTokenizer
from services.generator.openai.formats.openai_requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingRequest,
    transcript,
)
from services.generator.openai.idempotency import RepeatKey
from services.generator.openai.sessions.agent_session import (
    AnsweredRequest,
    History,
    Sampled,
    Session,
    Turn,
    token_ids_of,
)
from services.generator.openai.sessions.group_sender import GroupPutter
from services.generator.openai.sessions.kept_sessions import KeptSessions
from services.generator.openai.sessions.metrics import OpenAIMetrics
from services.generator.openai.sessions.session_admission import SessionAdmission
from services.generator.openai.sessions.session_groups import MOVED, SessionGroups
from services.generator.openai.sessions.stored_session import Reward, StoredSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The session that a request's headers name."""

    session_id: str
    task: str
    """Empty if siblings are recognised by their first prompt."""


@dataclass(slots=True, eq=False)
class Outcome:
    """The outcome of a session's request."""

    session: Session
    turn: Turn
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A request, ready for the engine."""

    body: SamplingRequest
    sampling: SamplingSettings
    parent: Turn | None
    """The turn that it continues."""
    given_token_ids: list[int]
    """The tokens after the parent's."""
    prompt_token_ids: tuple[int, ...]
    """All tokens before the answer."""
    history: History
    """The conversation without the answer."""
    transcript: list[tuple[str, str]]
    """The conversation for display and for reward models."""
    labels: Labels | None
    answered: AnsweredRequest | None = None
    """How a repetition of the request is recognised; None outside of sessions."""
    outcomes: list[Outcome] = field(default_factory=list)
    """One for each recorded turn."""


class Agents:
    """Answers requests; one per process.

    Args:
        unleased: Decodes samples without a lease.
        tokenizer: The model's tokenizer.
        putter: Provides the run's settings.
        kept: Keeps sessions at the broker.
        config: Limits, and the run's sampling settings.
        metrics: Receives the counts.
        clock: Source of the time.
    """

    def __init__(
        self,
        unleased: UnleasedSamples,
        *,
        tokenizer: ConversationTokenizer,
        putter: GroupPutter,
        kept: KeptSessions,
        config: OpenAIConfig,
        metrics: OpenAIMetrics,
        clock: Clock,
    ) -> None:
        self.tokenizer = tokenizer
        self.clock = clock
        self._unleased = unleased
        self._putter = putter
        self._kept = kept
        self._config = config
        self._metrics = metrics
        self._groups: SessionGroups | None = None
        self._keeping: set[asyncio.Task[None]] = set()
        self._admission = SessionAdmission(
            putter.get_run,
            version=lambda: unleased.policy_version,
            transit=putter.transit,
            monotonic_s=clock.monotonic_s,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together that the engine holds."""
        return self._unleased.parts.engine.max_model_len

    @property
    def is_closed(self) -> bool:
        """Whether the process stops."""
        return self._groups is not None and self._groups.is_closed

    async def groups(self) -> SessionGroups:
        """The sessions; raises ApiError while the run is unknown."""
        if self._groups is None:
            try:
                limits = await self._putter.limits()
            except PenstockError as error:
                raise unavailable(f"the run is not known yet: {error}") from error
            group_size = min(self._config.group_size or limits.group_size, limits.group_size)
            self._groups = self._groups or SessionGroups(self._config, group_size=group_size)
        return self._groups

    async def prepare_chat(self, body: ChatRequest, labels: Labels | None) -> Prepared:
        """Prepare a chat request; raises ApiError."""
        session, history = await self._session(labels), body.history()
        messages = [message.for_template() for message in body.messages]
        parent = session.longest_match(history) if session is not None else None
        given: list[int] | None = None
        if parent is not None:
            # The history's first item represents the tools.
            tail = await self.tokenizer.chat_tail(messages, body.usable_tools, num_known=len(parent.history) - 1)
            given = None if tail is None else await self.tokenizer.encode_tail(tail.removeprefix(parent.unsaid))
        if given is None:
            parent, given = None, await self.tokenizer.encode_chat(messages, body.usable_tools)
        limit = body.max_completion_tokens or body.max_tokens
        return await self._prepared(body, labels, parent, given, history, transcript(body.messages), limit)

    async def prepare_text(self, body: CompletionRequest, labels: Labels | None) -> Prepared:
        """Prepare a text or token-id request; raises ApiError."""
        session, prompt = await self._session(labels), body.only_prompt
        history: History = prompt if isinstance(prompt, str) else np.asarray(prompt, "<i4").tobytes()
        parent = session.longest_match(history) if session is not None else None
        rest = history[len(parent.history) :] if parent is not None else history
        if isinstance(rest, str):
            tail = rest.removeprefix(parent.unsaid) if parent is not None else rest
            given = await (self.tokenizer.encode_tail(tail) if parent is not None else self.tokenizer.encode_text(tail))
        else:
            given = np.frombuffer(bytes(rest), "<i4").tolist() if isinstance(rest, bytes) else []
        said = [("user", prompt if isinstance(prompt, str) else self.tokenizer.text_of(prompt))]
        return await self._prepared(body, labels, parent, given, history, said, body.max_tokens)

    async def answer(self, prepared: Prepared, *, index: int, emit: Callable[[Piece], Awaitable[None]]) -> Answer:
        """Sample one answer; its turn is recorded if the request has a session.

        Raises ApiError, and what `UnleasedSamples.decode` and `take_answer` raise.
        """
        begun_s = self.clock.monotonic_s()
        session = await self._enter(prepared)
        try:
            answer = await self._sample(prepared, index, emit)
            if session is not None:
                self._record(session, prepared, answer, begun_s)
                await self._keep(session)
            return answer
        finally:
            if session is not None and self._groups is not None:
                self._groups.leave(session, self.clock.monotonic_s())

    async def repeated(self, prepared: Prepared, key: RepeatKey) -> Prepared:
        """The request with the answer that its session has for this key, if any, from whichever process sampled it.

        Raises ApiError: the key came with another request.
        """
        session = (await self.groups()).find(key.session_id)
        turn = session.answer_to(key.digest) if session is not None else None
        if session is None or turn is None or turn.answers is None:
            return prepared
        key.check_body(turn.answers.body_digest)
        given = turn.given_token_ids.tolist()
        known = replace(
            prepared,
            parent=turn.parent,
            given_token_ids=given,
            prompt_token_ids=(*token_ids_of(turn.parent), *given),
            answered=turn.answers,
        )

        async def ignore(_piece: Piece) -> None:
            pass

        answer = await self._collect(
            known, self._request(known, 0), _spans(turn.sampled), ignore, run_history=turn.sampled.run_history
        )
        known.outcomes.append(Outcome(session, turn, answer))
        session.last_used_s = self.clock.monotonic_s()
        return known

    async def touch(self, session_id: str) -> bool:
        """Whether a session is open, which then counts as used; raises ApiError if it has ended."""
        session = (await self.groups()).find(session_id)
        if session is not None:
            session.last_used_s = self.clock.monotonic_s()
        return session is not None

    def note_delivery(self, prepared: Prepared, *, is_whole: bool) -> None:
        """Record whether the client of a request got its whole answer."""
        for outcome in prepared.outcomes:
            if is_whole:
                outcome.session.undelivered.discard(outcome.turn)
            else:
                outcome.session.undelivered.add(outcome.turn)
                keeping = asyncio.create_task(self._keep_again(outcome.session))
                self._keeping.add(keeping)
                keeping.add_done_callback(self._keeping.discard)

    async def finish(self, session_id: str, reward: float, *, components: dict[str, float], model: str) -> bool:
        """End a session with its reward; returns whether this was the first time. Raises ApiError."""
        groups, now_s = await self.groups(), self.clock.monotonic_s()
        if not groups.is_over(session_id):
            given = Reward(value=reward, components=components, model=model, finish_s=now_s)
            await self._keep(groups.finishable(session_id), given)
        is_first = groups.finish(session_id, reward, now_s, components=components, model=model)
        self._putter.notify()
        return is_first

    async def drop(self, session_id: str, reason: str) -> bool:
        """Give a session up; returns whether it existed. Raises ApiError."""
        is_dropped = (await self.groups()).drop(session_id, reason)
        self._putter.notify()
        return is_dropped

    async def find(self, session_id: str, task: str = "") -> Session | None:
        """An open session, brought here with those of its named task where its generator is gone; None for a new one.

        Raises ApiError.
        """
        await self.fetch(session_id, task)
        return (await self.groups()).find(session_id)

    async def fetch(self, session_id: str, task: str = "") -> None:
        """Bring a session here, and those of its task unless that is empty, where their generator is gone."""
        if not (await self.groups()).knows(session_id, task):
            await self.adopt(await self._kept.take(session_id, task))

    async def adopt(self, found: Sequence[StoredSession]) -> None:
        """Go on with sessions whose generator is gone."""
        (await self.groups()).restore(found)
        self._putter.notify()

    async def _keep(self, session: Session, reward: Reward | None = None) -> None:
        """Have the session stored as it is now. Raises ApiError: another generator has it by now."""
        groups = await self.groups()
        stored = groups.stored(session, reward)
        if stored is None:
            return
        try:
            await self._kept.store(stored)
        except ApiError:
            groups.drop(session.session_id, MOVED)
            raise

    async def _keep_again(self, session: Session) -> None:
        with suppress(ApiError):
            await self._keep(session)

    async def _session(self, labels: Labels | None) -> Session | None:
        return None if labels is None else await self.find(labels.session_id, labels.task)

    async def _prepared(
        self,
        body: SamplingRequest,
        labels: Labels | None,
        parent: Turn | None,
        given: list[int],
        history: History,
        said: list[tuple[str, str]],
        limit: int | None,
    ) -> Prepared:
        prompt = (*token_ids_of(parent), *given)
        if not prompt:
            raise invalid("prompt", "has no tokens")
        num_left = self.max_model_len - len(prompt)
        if labels is not None:
            num_left = min(num_left, await self._num_left_in_run(parent, given))
        if num_left < 1:
            raise ApiError(
                400,
                f"{len(prompt)} prompt tokens leave no room for an answer: the context holds "
                f"{self.max_model_len} tokens, and a session has at most the run's "
                "sampling.max_new_tokens beyond its first prompt",
                code="context_length_exceeded",
                param="messages",
            )
        most = min(num_left, limit or num_left)
        sampling = self._sampling(body, is_in_session=labels is not None, max_new_tokens=most)
        return Prepared(
            body=body,
            sampling=sampling,
            parent=parent,
            given_token_ids=given,
            prompt_token_ids=prompt,
            history=history,
            transcript=said,
            labels=labels,
        )

    async def _num_left_in_run(self, parent: Turn | None, given: list[int]) -> int:
        max_tokens = (await self._putter.limits()).max_completion_tokens
        if parent is None:
            return max_tokens
        num_before = len(token_ids_of(parent)) - len(parent.path()[0].given_token_ids)
        return max_tokens - num_before - len(given)

    def _sampling(self, body: SamplingRequest, *, is_in_session: bool, max_new_tokens: int) -> SamplingSettings:
        config = self._config
        temperature = config.temperature if body.temperature is None else body.temperature
        top_p = 1.0 if body.top_p is None else body.top_p
        top_k = body.top_k if body.top_k is not None and body.top_k > 0 else None
        if is_in_session:
            if body.n > 1:
                raise invalid("n", f"{body.n} in a session, which has one answer a turn: open more sessions")
            for name, found, wanted in (
                ("temperature", temperature, config.temperature),
                ("top_p", top_p, 1.0),
                ("top_k", top_k, None),
            ):
                if found != wanted:
                    raise invalid(
                        name, f"{found} in a session; the run trains on what is sampled at {wanted}: leave it out"
                    )
        return SamplingSettings(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            seed=body.seed,
            stop_token_ids=tuple(dict.fromkeys((*self._unleased.parts.end_token_ids, *(body.stop_token_ids or ())))),
        )

    async def _enter(self, prepared: Prepared) -> Session | None:
        labels = prepared.labels
        if labels is None:
            return None
        prompt = np.asarray(prepared.prompt_token_ids, "<i4").tobytes()
        task = labels.task or f"prompt-{hashlib.blake2b(prompt, digest_size=12).hexdigest()}"
        groups = await self.groups()
        if groups.begins_group(labels.session_id, task):
            await self._wait_for_admission(groups, labels.session_id, task)
        session = groups.enter(labels.session_id, task, self.clock.monotonic_s())
        session.has_named_task = bool(labels.task)
        return session

    async def _wait_for_admission(self, groups: SessionGroups, session_id: str, task: str) -> None:
        try:
            await self._admission.wait(
                num_held=lambda: groups.num_groups, is_needed=lambda: groups.begins_group(session_id, task)
            )
        except PenstockError as error:
            raise unavailable(f"the broker does not answer: {error}") from error

    async def _sample(self, prepared: Prepared, index: int, emit: Callable[[Piece], Awaitable[None]]) -> Answer:
        request = self._request(prepared, index)
        spans = self._unleased.decode(request, wait_s=self._config.request_timeout_s)
        return await self._collect(prepared, request, spans, emit)

    def _request(self, prepared: Prepared, index: int) -> GenerateRequest:
        sampling = prepared.sampling
        seed = None if sampling.seed is None else sampling.seed + index
        return GenerateRequest(
            request_id=f"agent-{secrets.token_hex(12)}",
            prompt_token_ids=prepared.prompt_token_ids,
            sampling=replace(sampling, seed=seed),
            has_routes=self._unleased.parts.records_routes and prepared.labels is not None,
        )

    async def _collect(
        self,
        prepared: Prepared,
        request: GenerateRequest,
        spans: AsyncGenerator[TokenSpan, None],
        emit: Callable[[Piece], Awaitable[None]],
        *,
        run_history: int | None = None,
    ) -> Answer:
        body = prepared.body
        return await take_answer(
            spans,
            request,
            tokenizer=self.tokenizer,
            stops=body.stops,
            emit=emit,
            finds_tools=isinstance(body, ChatRequest) and body.usable_tools is not None,
            run_history=lambda: (self._unleased.run_history or 0) if run_history is None else run_history,
        )

    def _record(self, session: Session, prepared: Prepared, answer: Answer, begun_s: float) -> None:
        history, said = self._said(prepared, answer)
        caller = current()
        turn = Turn(
            parent=prepared.parent,
            given_token_ids=np.asarray(prepared.given_token_ids, np.int32),
            sampled=answer.sampled.without_routes_before(len(prepared.given_token_ids)),
            history=history,
            unsaid=answer.unsaid,
            begun_s=begun_s,
            ended_s=self.clock.monotonic_s(),
            caller="" if caller is None else caller.traceparent,
            answers=prepared.answered,
        )
        self._metrics.turns.labels(_kind(session, prepared.parent)).inc()
        session.add(turn, [*prepared.transcript, ("assistant", said)])
        prepared.outcomes.append(Outcome(session, turn, answer))

    def _said(self, prepared: Prepared, answer: Answer) -> tuple[History, str]:
        """The conversation with the answer as the client will repeat it, and the answer's text."""
        history = prepared.history
        if isinstance(history, str):
            return history + answer.text, answer.text
        if isinstance(history, bytes):
            # Token ids were given and, with return_token_ids, returned: the sampled ids are what the client repeats.
            return history + answer.sampled.token_ids.astype("<i4").tobytes(), answer.text
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in answer.tool_calls]
        message = Message.model_validate({"role": "assistant", "content": answer.content, "tool_calls": calls or None})
        return (*history, message.digest()), answer.content


async def _spans(sampled: Sampled) -> AsyncGenerator[TokenSpan, None]:
    """What the engine gave for an answer that is known, a token a span."""
    reason, num_tokens = FinishReason.LENGTH if sampled.is_truncated else FinishReason.STOP, len(sampled.token_ids)
    for at in range(num_tokens):
        yield TokenSpan(
            token_ids=sampled.token_ids[at : at + 1],
            logprobs=sampled.logprobs[at : at + 1],
            policy_version=int(sampled.versions[at]),
            finish_reason=reason if at == num_tokens - 1 else None,
        )


def _kind(session: Session, parent: Turn | None) -> str:
    if not session.turns:
        return "first"
    if parent is None:
        return "anew"
    return "branched" if any(turn.parent is parent for turn in session.turns) else "continued"
