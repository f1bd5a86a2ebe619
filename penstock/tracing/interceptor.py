"""Continues, in a gRPC server, the trace of each call's caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from penstock.tracing.context import context_in, take


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """What a call does, and logs, belongs to the span that its `traceparent` names; a malformed one counts as none."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Take the context over; gRPC serves each call in a task of its own."""
        take(context_in(handler_call_details.invocation_metadata or ()))
        return await continuation(handler_call_details)
