"""The check every gRPC call passes: the caller, whether the call is open to its role, and whether the run is its own.

Roles stand in the protos (option `roles`). Health is open to all; reflection to every caller with a credential.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
from google.protobuf import descriptor_pool
from grpc_status import rpc_status

from penstock.errors import BadTokenError, PenstockError, to_status
from penstock.security.bearer_tokens import Tokens
from penstock.security.handlers import Context, checked, wrapped
from penstock.security.revocations import LOOK_EVERY_S, OpenCallers, Revocations, serial_of_pem
from penstock.security.roles import OPERATOR, Caller, allowed_roles, caller_of_context

_OPEN_METHODS = ("/grpc.health.v1.Health/",)
_ANYBODY_METHODS = ("/grpc.reflection.",)

_caller: ContextVar[Caller] = ContextVar("caller", default=OPERATOR)


def current_caller() -> Caller:
    """The caller of the call being served; the operator outside of one."""
    return _caller.get()


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Admits the calls that the caller's role allows.

    Args:
        tokens: The accepted tokens.
        revocations: Certificates that are refused; calls that go on when theirs is added end.
    """

    def __init__(self, tokens: Tokens, revocations: Revocations) -> None:
        self._tokens = tokens
        self._open = OpenCallers(revocations)
        self._cutting: set[asyncio.Task[None]] = set()

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
        return wrapped(
            handler,
            functools.partial(self._admitted, method, str(given)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    @asynccontextmanager
    async def _admitted(self, method: str, authorization: str, request: Any, context: Context) -> AsyncIterator[Any]:
        """The request, checked, of a caller that is let through; the call ends otherwise, or once that is revoked."""
        with ExitStack() as stack:
            try:
                serving = asyncio.current_task()
                assert serving is not None
                end = functools.partial(self._end, context, serving)
                for certificate in context.auth_context().get("x509_pem_cert", ()):
                    stack.enter_context(self._open.call(serial_of_pem(certificate), end))
                caller = identify(self._tokens, authorization, caller_of_context(context))
                if not method.startswith(_ANYBODY_METHODS):
                    caller = caller.restricted_to(roles_of(method), what=method)
                if not caller.is_operator:
                    request = checked(request, caller.check_message)
            except PenstockError as error:
                await _abort(context, error)
            _caller.set(caller)
            yield request

    def _end(self, context: Context, serving: asyncio.Task[Any], problem: BadTokenError) -> None:
        """End a call that goes on."""

        async def cut() -> None:
            # First, and from here: a task that is cancelled while it waits for a slow receiver ends without a status.
            with suppress(grpc.aio.AbortError, grpc.aio.UsageError, TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await _abort(context, problem)
            serving.cancel()

        task = asyncio.create_task(cut())
        self._cutting.add(task)
        task.add_done_callback(self._cutting.discard)


async def _abort(context: Context, error: PenstockError) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("unreachable: abort raises")


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
