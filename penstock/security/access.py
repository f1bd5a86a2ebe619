"""The check every gRPC call passes: the caller, whether the call is open to its role, and whether the run is its own.

Roles stand in the protos (option `roles`). Health is open to all; reflection to every caller with a credential.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_status import rpc_status

from penstock.errors import BadTokenError, PenstockError, to_status
from penstock.security.bearer_tokens import Tokens
from penstock.security.roles import OPERATOR, Caller, allowed_roles, caller_of_context

_OPEN_METHODS = ("/grpc.health.v1.Health/",)
_ANYBODY_METHODS = ("/grpc.reflection.",)
_Context = grpc.aio.ServicerContext[Any, Any]

_caller: ContextVar[Caller] = ContextVar("caller", default=OPERATOR)


def current_caller() -> Caller:
    """The caller of the call being served; the operator outside of one."""
    return _caller.get()


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Admits the calls that the caller's role allows.

    Args:
        tokens: The accepted tokens.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's handler."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method.startswith(_OPEN_METHODS):
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        admit = functools.partial(self._admit, method, str(given))
        streams_in, streams_out = handler.request_streaming, handler.response_streaming
        kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
        wrap = _checked_stream if streams_out else _checked_unary
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            wrap(getattr(handler, kind), admit),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _admit(self, method: str, authorization: str, context: _Context) -> Caller:
        caller = identify(self._tokens, authorization, caller_of_context(context))
        if method.startswith(_ANYBODY_METHODS):
            return caller
        return caller.restricted_to(roles_of(method), what=method)


def identify(
    tokens: Tokens, authorization: str, of_certificate: Caller | None, *, shows_what_is_asked: bool = True
) -> Caller:
    """The caller. Raises BadTokenError.

    Args:
        tokens: The accepted tokens.
        authorization: The header; an unknown one is refused if tokens are configured.
        of_certificate: The caller by its certificate, if that names roles.
        shows_what_is_asked: Whether a certificate of our authority was shown, or none is required.
    """
    shown = tokens.caller(authorization)
    if authorization and tokens and shown is None:
        raise BadTokenError("wrong bearer token; set PENSTOCK_TOKEN")
    found = of_certificate or shown
    if found is not None:
        return found
    if tokens or not shows_what_is_asked:
        raise BadTokenError("missing bearer token; set PENSTOCK_TOKEN, or show a certificate with a role")
    # A certificate of our own authority without roles, or plain text where nothing more is required.
    return OPERATOR


@functools.cache
def roles_of(method: str) -> frozenset[int]:
    """Roles that a method of that path is open to, besides the operator; none if it is unknown."""
    service, _, name = method.lstrip("/").partition("/")
    try:
        found = descriptor_pool.Default().FindServiceByName(service).methods_by_name.get(name)
    except KeyError:
        return frozenset()
    return frozenset() if found is None else allowed_roles(found)


def _checked_unary(behaviour: Callable[..., Awaitable[Any]], admit: Callable[[_Context], Caller]) -> Any:
    async def checked(request: Any, context: _Context) -> Any:
        return await behaviour(await _admitted(request, context, admit), context)

    return checked


def _checked_stream(behaviour: Callable[..., AsyncIterator[Any]], admit: Callable[[_Context], Caller]) -> Any:
    async def checked(request: Any, context: _Context) -> AsyncIterator[Any]:
        async for response in behaviour(await _admitted(request, context, admit), context):
            yield response

    return checked


async def _admitted(request: Any, context: _Context, admit: Callable[[_Context], Caller]) -> Any:
    """The request, checked, of a caller that is let through; ends the call otherwise."""
    try:
        caller = admit(context)
        request = _of_caller(request, caller)
    except PenstockError as error:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))
    _caller.set(caller)
    return request


def _of_caller(request: Any, caller: Caller) -> Any:
    """The request, checked; of a stream, each as it is read."""
    if hasattr(request, "__aiter__"):
        return request if caller.is_operator else _Requests(request, caller)
    caller.check_message(request)
    return request


class _Requests:
    """A client's stream; raises ForbiddenError at the first request of another run, site or name."""

    def __init__(self, requests: AsyncIterator[Any], caller: Caller) -> None:
        self._requests, self._caller = requests, caller

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        self._caller.check_message(request)
        return request
