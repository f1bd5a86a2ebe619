"""What checks of a user's server report, and how one is run: `penstock reward check` and `penstock env check`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.errors import (
    BadCertificateError,
    BadTokenError,
    NotOfferedError,
    PenstockError,
    ServiceUnavailableError,
)
from penstock.rewards.score_messages import CREDENTIALS_HINT


class CheckStatus(StrEnum):
    """Outcome of one check."""

    PASSED = "passed"
    NOTED = "noted"
    """Allowed, but worth knowing."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of the verdict."""

    name: str
    status: CheckStatus
    detail: str


class ViolationError(Exception):
    """The server breaks the contract; the message says how."""


class Note(Exception):  # noqa: N818 -- not an error: ends a check early with a remark
    """Allowed, but worth knowing."""


def conforms(results: Sequence[CheckResult]) -> bool:
    """Whether no check failed."""
    return all(result.status is not CheckStatus.FAILED for result in results)


async def run_check(name: str, check: Callable[[], Awaitable[str]]) -> CheckResult:
    """Its result; PenstockErrors and violations fail it."""
    try:
        return CheckResult(name=name, status=CheckStatus.PASSED, detail=await check())
    except Note as note:
        return CheckResult(name=name, status=CheckStatus.NOTED, detail=str(note))
    except (ViolationError, PenstockError) as error:
        return CheckResult(name=name, status=CheckStatus.FAILED, detail=str(error))


@contextmanager
def reaching(target: str, service: str) -> Iterator[None]:
    """Around the first call: that the server cannot be called is a violation. Raises ViolationError."""
    try:
        yield
    except (BadTokenError, BadCertificateError) as error:
        raise ViolationError(f"{error}; {CREDENTIALS_HINT}") from error
    except ServiceUnavailableError as error:
        raise ViolationError(f"no server answers at {target}: {error}") from error
    except NotOfferedError as error:
        raise ViolationError(f"{target} does not serve {service}") from error


async def health(channel: grpc.aio.Channel, service: str, *, timeout_s: float) -> str:
    """Check its health service. Raises Note, ViolationError."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise Note(f"no grpc.health.v1 status for {service} ({error.code().name}); offer it") from error
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        raise ViolationError("health says NOT_SERVING while the server answers")
    return "SERVING"


async def reflection(channel: grpc.aio.Channel, *, timeout_s: float) -> str:
    """List the services by reflection. Raises Note."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    try:
        names: list[str] = []
        async for response in stub.ServerReflectionInfo(requests, timeout=timeout_s):
            names += [service.name for service in response.list_services_response.service]
    except grpc.aio.AioRpcError as error:
        raise Note("no server reflection; it is optional") from error
    return ", ".join(names)
