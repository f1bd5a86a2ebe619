"""Serves the OpenAI-compatible endpoint over HTTP.

    POST   /v1/chat/completions, /v1/completions      as OpenAI's, with streams
    POST   /inference/v1/generate                     token ids in, token ids and log-probs out, as vLLM's
    GET    /v1/models, /v1/models/{name}
    POST   /v1/sessions/{id}/reward                   ends a session
    GET    /v1/sessions/{id}                          its state
    DELETE /v1/sessions/{id}                          gives it up
    POST   /v1/session_keys                           a key for an agent
    GET    /health                                    without a credential

A client that disconnects aborts its sample. Tokens and agents' keys are sent as OpenAI's clients send an API key.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import structlog
from aiohttp import web

from penstock.errors import BadTokenError, ForbiddenError
from penstock.security import Security
from penstock.security.http_access import ANYBODY, Handler
from penstock.security.roles import Role
from penstock.security.session_keys import Opens, SessionKey, SessionKeys
from penstock.tracing import is_on, within
from penstock.tracing.context import context_in
from services.generator.engine.engine import EngineError, RequestRefusedError
from services.generator.openai.answer_sampling import Answer, AnswerAbortedError, Piece
from services.generator.openai.endpoint import Agents, Labels, Prepared
from services.generator.openai.event_stream import EventStream
from services.generator.openai.formats.api_errors import ApiError, unavailable
from services.generator.openai.formats.openai_requests import (
    ChatRequest,
    CompletionRequest,
    RewardRequest,
    SamplingRequest,
    SessionKeyRequest,
    read,
)
from services.generator.openai.formats.token_requests import TokenForm, TokenRequest
from services.generator.openai.idempotency import KEY_HEADER, RETRY_HEADER, KeptAnswers, RepeatKey, repeat_key
from services.generator.openai.placement import Placement
from services.generator.openai.responses import Form
from services.generator.openai.route_access import (
    PEERS_SESSION_HEADER,
    SESSION_HEADER,
    Doors,
    checked_session,
    labels_of,
)
from services.generator.openai.session_reward import SessionRewards
from services.generator.openai.sessions.agent_session import AnsweredRequest
from services.generator.openai.sessions.metrics import OpenAIMetrics

MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT_S = 30.0
BUSY_RETRY_S = 2.0
_SAMPLING_ROUTES = {
    "/v1/chat/completions": SESSION_HEADER,
    "/v1/completions": SESSION_HEADER,
    "/inference/v1/generate": PEERS_SESSION_HEADER,
}
"""Routes that make turns of sessions, and what may name the session beside SESSION_HEADER."""

_log = structlog.get_logger()


class OpenAIRoutes:
    """The handlers.

    Args:
        agents: Answers requests.
        rewards: Scores sessions that are finished without a reward.
        metrics: Receives the counts.
        model_name: The model's name in requests.
        security: Credentials of this process.
        keys: Issues and reads agents' keys.
        request_timeout_s: Time limit of a request.
        placement: Says where sessions are.
    """

    def __init__(
        self,
        agents: Agents,
        *,
        rewards: SessionRewards,
        metrics: OpenAIMetrics,
        model_name: str,
        security: Security,
        keys: SessionKeys,
        request_timeout_s: float,
        placement: Placement,
    ) -> None:
        self._placement = placement
        self._agents = agents
        self._rewards = rewards
        self._metrics = metrics
        self._model_name = model_name
        self._keys = keys
        self._doors = Doors(security, keys, now_s=agents.clock.now_s)
        self._request_timeout_s = request_timeout_s
        self._kept: KeptAnswers[tuple[Prepared, Form]] = KeptAnswers()
        self._start_s = int(agents.clock.now_s())

    def application(self) -> web.Application:
        """The application, not yet served."""
        app = web.Application(middlewares=[self._answer_errors], client_max_size=MAX_BODY_BYTES)
        of = [Role.ACCESS_ROLE_ENVIRONMENT]
        add = functools.partial(self._doors.add, app)
        add("POST", "/v1/chat/completions", self._chat, roles=of, key=Opens.COMPLETE)
        add("POST", "/v1/completions", self._complete, roles=of, key=Opens.COMPLETE)
        add("POST", "/inference/v1/generate", self._generate, roles=of, key=Opens.COMPLETE)
        add("GET", "/v1/models", self._models, roles=of, key=Opens.COMPLETE)
        add("GET", "/v1/models/{name:.+}", self._model, roles=of, key=Opens.COMPLETE)
        add("POST", "/v1/sessions/{id}/reward", self._reward, roles=of, key=Opens.REWARD)
        add("GET", "/v1/sessions/{id}", self._session, roles=of)
        add("DELETE", "/v1/sessions/{id}", self._drop, roles=of)
        add("POST", "/v1/session_keys", self._session_key, roles=of)
        add("GET", "/health", self._health, roles=ANYBODY)
        return app

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._doors.admit(request)
            with within(context_in(request.headers) if is_on() else None):
                response = await self._placed(request, handler)
        except web.HTTPException as error:
            response = _error(ApiError(error.status, error.reason))
        except Exception as error:
            response = _error(as_api_error(error))
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "other"
        self._metrics.requests.labels(path, str(response.status)).inc()
        return response

    async def _placed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The answer here, or of the generator that has the request's session."""
        session_id, task = request.match_info.get("id"), None
        if request.method == "POST" and session_id is None and request.path in _SAMPLING_ROUTES:
            labels = labels_of(request, session_header=_SAMPLING_ROUTES[request.path])
            session_id, task = (labels.session_id, labels.task or labels.session_id) if labels else (None, None)
        if session_id is None:
            return await handler(request)
        return await self._placement.answer(
            request, session_id=session_id, task=task, body=await _body(request), serve=lambda: handler(request)
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, labels = read(ChatRequest, await _body(request)), labels_of(request)
        self._check_model(body)
        return await self._answered_once(request, labels, lambda: self._agents.prepare_chat(body, labels))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body, labels = read(CompletionRequest, await _body(request)), labels_of(request)
        self._check_model(body)
        return await self._answered_once(request, labels, lambda: self._agents.prepare_text(body, labels))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = read(TokenRequest, await _body(request))
        body, labels = asked.completion(), labels_of(request, session_header=PEERS_SESSION_HEADER)
        self._check_model(body)
        form = functools.partial(self._form, kind=TokenForm, response_id=asked.request_id)
        return await self._answered_once(request, labels, lambda: self._agents.prepare_text(body, labels), form)

    async def _answered_once(
        self,
        request: web.Request,
        labels: Labels | None,
        prepare: Callable[[], Awaitable[Prepared]],
        form_of: Callable[[Prepared], Form] | None = None,
    ) -> web.StreamResponse:
        """A new answer, or the kept answer to the same request."""
        header = request.headers.get
        session_id = None if labels is None else labels.session_id
        key = repeat_key(session_id, header(KEY_HEADER), header(RETRY_HEADER), await _body(request))
        form_of = form_of or self._form
        if key is None:
            prepared = await prepare()
            return await self._respond(request, prepared, form_of(prepared))
        async with asyncio.timeout(self._request_timeout_s) as waiting, self._kept.slot(key) as slot:
            waiting.reschedule(None)
            if slot.made is not None and await self._agents.touch(key.session_id):
                self._metrics.repeats.inc()
                return await self._respond(request, *slot.made)
            prepared = await prepare()
            if key.is_repetition:
                prepared = await self._agents.repeated(prepared, key)
            form = form_of(prepared)
            if prepared.answered is not None:
                self._metrics.repeats.inc()
                form = replace(form, response_id=prepared.answered.response_id, created_s=prepared.answered.created_s)
            else:
                prepared = replace(prepared, answered=_answered(key, form))
            try:
                return await self._respond(request, prepared, form)
            finally:
                slot.made = (prepared, form) if prepared.outcomes else None

    def _form(self, prepared: Prepared, *, kind: type[Form] = Form, response_id: str | None = None) -> Form:
        is_chat = isinstance(prepared.body, ChatRequest)
        return kind(
            response_id=response_id or f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            created_s=int(self._agents.clock.now_s()),
            model=self._model_name,
            body=prepared.body,
            tokenizer=self._agents.tokenizer,
        )

    async def _respond(self, request: web.Request, prepared: Prepared, form: Form) -> web.StreamResponse:
        """Sample, unless an answer is kept, and send it whole."""
        is_whole = False
        try:
            if prepared.body.stream:
                stream = EventStream(request, agents=self._agents, prepared=prepared, form=form)
                is_whole = await self._stream(stream, prepared)
                return stream.response
            response = web.json_response(form.whole(prepared, await self._answers(prepared)))
            try:
                await response.prepare(request)
                await response.write_eof()
                is_whole = True
            except ConnectionError:
                _log.info("a client went away before its answer")
            return response
        finally:
            self._agents.note_delivery(prepared, is_whole=is_whole)

    async def _answers(self, prepared: Prepared) -> list[Answer]:
        if prepared.outcomes:
            return [outcome.answer for outcome in prepared.outcomes]

        async def ignore(_piece: Piece) -> None:
            pass

        return await self._all(prepared, lambda index: self._agents.answer(prepared, index=index, emit=ignore))

    async def _stream(self, stream: EventStream, prepared: Prepared) -> bool:
        """Send a stream; returns whether all of it was sent."""
        try:
            if prepared.outcomes:
                answers = [await stream.repeat(index, made.answer) for index, made in enumerate(prepared.outcomes)]
            else:
                answers = await self._all(prepared, stream.answer)
            await stream.end(answers)
            return True
        except ConnectionError:
            _log.info("a client went away in the middle of its stream")
        except Exception as error:
            if not stream.is_begun:
                raise
            # Too late for a status: OpenAI's clients raise on an event with an error.
            await stream.write(as_api_error(error).body())
        return False

    async def _all(self, prepared: Prepared, answer: Callable[[int], Awaitable[Answer]]) -> list[Answer]:
        try:
            async with asyncio.timeout(self._request_timeout_s), asyncio.TaskGroup() as group:
                tasks = [group.create_task(_awaited(answer(index))) for index in range(prepared.body.n)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["name"] != self._model_name:
            raise self._unknown_model(request.match_info["name"])
        return web.json_response(self._model_card())

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session_id = checked_session(request, request.match_info["id"], Opens.REWARD)
        body = read(RewardRequest, await _body(request) or b"{}")
        return web.json_response(await self._rewards.finish(session_id, body))

    async def _session(self, request: web.Request) -> web.StreamResponse:
        session_id = checked_session(request, request.match_info["id"], Opens.COMPLETE)
        session = await self._agents.find(session_id)
        if session is None:
            raise ApiError(404, f"no session {session_id!r} here", code="unknown_session")
        branches = session.branches()
        return web.json_response(
            {
                "id": session_id,
                "object": "session",
                "group": session.task,
                "turns": len(session.turns),
                "branches": len(branches),
                "turns_not_taken": len(session.not_taken()),
                "sampled_tokens": sum(int(branch.loss_mask.sum()) for branch in branches),
            }
        )

    async def _drop(self, request: web.Request) -> web.StreamResponse:
        session_id = checked_session(request, request.match_info["id"], Opens.COMPLETE)
        return web.json_response({"id": session_id, "deleted": await self._agents.drop(session_id, "abandoned")})

    async def _session_key(self, request: web.Request) -> web.StreamResponse:
        body = read(SessionKeyRequest, await _body(request))
        key = SessionKey(
            run_id=self._keys.run_id,
            session=body.session,
            group=body.group,
            expire_s=int(self._agents.clock.now_s() + body.valid_s),
            opens=body.opens,
        )
        return web.json_response(
            {
                "object": "session_key",
                "key": self._keys.issue(key),
                "session": key.session,
                "group": key.group or None,
                "opens": sorted(key.opens),
                "expires_at": key.expire_s,
            }
        )

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        if self._agents.is_closed:
            return web.json_response({"status": "stopping"}, status=503)
        return web.json_response({"status": "ok"})

    def _check_model(self, body: SamplingRequest) -> None:
        if body.model not in (None, self._model_name):
            raise self._unknown_model(str(body.model))

    def _unknown_model(self, name: str) -> ApiError:
        return ApiError(
            404, f"model: {name!r} is not served here; use {self._model_name!r}", code="model_not_found", param="model"
        )

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._start_s,
            "owned_by": "penstock",
            "max_model_len": self._agents.max_model_len,
        }


def _answered(key: RepeatKey, form: Form) -> AnsweredRequest:
    return AnsweredRequest(
        key_digest=key.digest,
        body_digest=key.body_digest,
        response_id=form.response_id,
        created_s=form.created_s,
    )


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError as error:
        raise ApiError(408, f"the request's body did not come within {BODY_TIMEOUT_S:g} s", code="timeout") from error


async def _awaited(made: Awaitable[Answer]) -> Answer:
    return await made


def as_api_error(error: BaseException) -> ApiError:
    """The response to an error; an unexpected error is logged and reported without details."""
    match error:
        case ApiError():
            return error
        case BadTokenError() | ForbiddenError():
            is_unknown = isinstance(error, BadTokenError)
            return ApiError(
                401 if is_unknown else 403, str(error), code="invalid_api_key" if is_unknown else "forbidden"
            )
        case RequestRefusedError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case TimeoutError():
            return ApiError(429, "not answered in time: the generator is busy", code="busy", retry_after_s=BUSY_RETRY_S)
        case EngineError() | AnswerAbortedError():
            return unavailable(f"the generator stops or its engine failed: {error}")
        case _:
            _log.error("request failed", exc_info=error)
            return ApiError(500, "internal error; see the generator's log", code="internal")


def _error(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status, headers=error.headers())
