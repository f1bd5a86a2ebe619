"""Errors that cross the wire, one class per ErrorReason of `errors.proto`.

    PenstockError
    +-- InvalidFieldError        INVALID_ARGUMENT     a field is missing, malformed or out of bounds
    |   +-- RefusedError         INVALID_ARGUMENT     prompts or groups of a call were refused (clients)
    +-- UnknownRunError          NOT_FOUND            open the run first
    +-- UnknownSampleError       NOT_FOUND            no such group or sample
    +-- LeaseLostError           NOT_FOUND            the lease expired or was revoked
    +-- UnknownSessionError      NOT_FOUND            an environment has no such session open
    +-- UnknownVersionError      NOT_FOUND            no weights of that version
    +-- OffsetMismatchError      OUT_OF_RANGE         a chunk does not begin where the accepted tokens end
    +-- NotRetainedError         OUT_OF_RANGE         a trained step's payload is no longer kept
    +-- QueueFullError           RESOURCE_EXHAUSTED   retry after a delay
    +-- StaleError               FAILED_PRECONDITION  older than the staleness bound allows
    +-- VersionConflictError     FAILED_PRECONDITION  the step does not follow the run's policy version
    +-- RunConflictError         FAILED_PRECONDITION  the run exists with other limits or policy
    +-- RunClosedError           FAILED_PRECONDITION  the run is closed
    +-- FencedError              FAILED_PRECONDITION  another trainer has taken the run over
    +-- OtherInstanceError       FAILED_PRECONDITION  another run was opened under this id
    +-- WrongOwnerError          FAILED_PRECONDITION  chunks of token shards of another broker
    +-- TurnConflictError        FAILED_PRECONDITION  not the session's next turn, nor one that it took
    +-- ServiceUnavailableError  UNAVAILABLE          draining, or a part it needs is away
    |   +-- BadCertificateError  UNAVAILABLE          TLS with it fails: certificate, name, authority (clients)
    +-- DigestMismatchError      DATA_LOSS            weights are not what their manifest states
    +-- NotOfferedError          UNIMPLEMENTED        this server does not offer the call
    +-- BadTokenError            UNAUTHENTICATED      the bearer token is missing or wrong
    +-- ForbiddenError           PERMISSION_DENIED    the call is not open to the caller's role
    +-- BusyError                ALREADY_EXISTS       another run is under way
    +-- InternalError            INTERNAL             a fault of the server

A server raises them; one interceptor (`penstock.network.rpc`) turns them into a status with an ErrorInfo detail; a
client gets the same class back from `from_rpc_error`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

ERROR_DOMAIN = "penstock"
MAX_MESSAGE_BYTES = 2048
MAX_METADATA_BYTES = 256
"""A status travels in a header of at most 16 KiB, the message twice and once of those percent-encoded."""


class PenstockError(Exception):
    """Base of every error that a Penstock service answers with; `metadata` names the field, value or id concerned."""

    code: ClassVar[int] = code_pb2.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return self.code in (code_pb2.UNAVAILABLE, code_pb2.RESOURCE_EXHAUSTED, code_pb2.DEADLINE_EXCEEDED)


class InvalidFieldError(PenstockError):
    """A field is missing, malformed or out of bounds."""

    code, reason = code_pb2.INVALID_ARGUMENT, "INVALID_FIELD"


class RefusedError(InvalidFieldError):
    """A broker refused some of the prompts or groups of a call for good; raised by clients, it never crosses the wire.

    `refusals` says why, one line each; `metadata["reason"]` is the ErrorReason of the first one.
    """

    def __init__(self, message: str, *, refusals: Sequence[str] = (), **metadata: object) -> None:
        super().__init__(message, **metadata)
        self.refusals = tuple(refusals)


class UnknownRunError(PenstockError):
    """The broker knows no such run."""

    code, reason = code_pb2.NOT_FOUND, "UNKNOWN_RUN"


class UnknownSampleError(PenstockError):
    """No such group or sample in the run."""

    code, reason = code_pb2.NOT_FOUND, "UNKNOWN_SAMPLE"


class LeaseLostError(PenstockError):
    """The lease expired or was revoked."""

    code, reason = code_pb2.NOT_FOUND, "LEASE_LOST"


class UnknownSessionError(PenstockError):
    """An environment has no such session open: its server restarted, or closed it as idle."""

    code, reason = code_pb2.NOT_FOUND, "UNKNOWN_SESSION"


class UnknownVersionError(PenstockError):
    """No weights of that version, yet or any more."""

    code, reason = code_pb2.NOT_FOUND, "UNKNOWN_VERSION"


class OffsetMismatchError(PenstockError):
    """A chunk does not begin where the accepted tokens end."""

    code, reason = code_pb2.OUT_OF_RANGE, "OFFSET_MISMATCH"


class NotRetainedError(PenstockError):
    """A trained step's payload is no longer kept; `metadata["oldest_policy_version"]` is what can still be had."""

    code, reason = code_pb2.OUT_OF_RANGE, "NOT_RETAINED"


class QueueFullError(PenstockError):
    """A queue is full."""

    code, reason = code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL"


class StaleError(PenstockError):
    """Older than the staleness bound allows."""

    code, reason = code_pb2.FAILED_PRECONDITION, "STALE"


class VersionConflictError(PenstockError):
    """The step does not follow the run's policy version."""

    code, reason = code_pb2.FAILED_PRECONDITION, "VERSION_CONFLICT"


class RunConflictError(PenstockError):
    """The run exists with other limits or another policy."""

    code, reason = code_pb2.FAILED_PRECONDITION, "RUN_CONFLICT"


class RunClosedError(PenstockError):
    """The run is closed."""

    code, reason = code_pb2.FAILED_PRECONDITION, "RUN_CLOSED"


class FencedError(PenstockError):
    """Another trainer has taken the run over; `metadata["owner_id"]` names it. The caller must end."""

    code, reason = code_pb2.FAILED_PRECONDITION, "FENCED"


class OtherInstanceError(PenstockError):
    """Another run was opened under this id."""

    code, reason = code_pb2.FAILED_PRECONDITION, "OTHER_INSTANCE"


class WrongOwnerError(PenstockError):
    """The chunks belong to another broker, `metadata["owner"]`, as their sender was shown."""

    code, reason = code_pb2.FAILED_PRECONDITION, "WRONG_OWNER"


class TurnConflictError(PenstockError):
    """A turn is neither the session's next one nor, word for word, one that it took."""

    code, reason = code_pb2.FAILED_PRECONDITION, "TURN_CONFLICT"


class SessionMovedError(PenstockError):
    """Another generator has the agent's session by now, or it has ended."""

    code, reason = code_pb2.FAILED_PRECONDITION, "SESSION_MOVED"


class ServiceUnavailableError(PenstockError):
    """The server drains, or a part it needs is away."""

    code, reason = code_pb2.UNAVAILABLE, "UNAVAILABLE"


class BadCertificateError(ServiceUnavailableError):
    """TLS with the server fails; raised by clients, it never crosses the wire.

    Retried like an outage: files are renewed and clocks set while processes go on.
    """


class DeadlineError(PenstockError):
    """The peer did not answer in time."""

    code, reason = code_pb2.DEADLINE_EXCEEDED, "DEADLINE"


class DigestMismatchError(PenstockError):
    """Weights do not have the digest their manifest states."""

    code, reason = code_pb2.DATA_LOSS, "DIGEST_MISMATCH"


class NotOfferedError(PenstockError):
    """This server does not offer the call."""

    code, reason = code_pb2.UNIMPLEMENTED, "NOT_OFFERED"


class BadTokenError(PenstockError):
    """The bearer token is missing or wrong."""

    code, reason = code_pb2.UNAUTHENTICATED, "BAD_TOKEN"


class ForbiddenError(PenstockError):
    """The call, or the run, site or name in it, is not open to the caller's role; never retry."""

    code, reason = code_pb2.PERMISSION_DENIED, "FORBIDDEN"


class BusyError(PenstockError):
    """Another run is under way."""

    code, reason = code_pb2.ALREADY_EXISTS, "BUSY"


class InternalError(PenstockError):
    """A fault of the server; it is logged there."""


def require(is_good: bool, field: str, value: object, expected: str) -> None:
    """Raise InvalidFieldError unless a field is good."""
    if not is_good:
        raise InvalidFieldError(f"{field}: {value!r}; must be {expected}", field=field)


_BY_REASON: dict[str, type[PenstockError]] = {kind.reason: kind for kind in PenstockError.__subclasses__()}
_BY_CODE: dict[int, type[PenstockError]] = {
    code_pb2.INVALID_ARGUMENT: InvalidFieldError,
    code_pb2.UNAVAILABLE: ServiceUnavailableError,
    # A server that stops without grace ends its streams like this; our own cancellations raise CancelledError instead.
    code_pb2.CANCELLED: ServiceUnavailableError,
    code_pb2.RESOURCE_EXHAUSTED: QueueFullError,
    code_pb2.DEADLINE_EXCEEDED: DeadlineError,
    code_pb2.UNIMPLEMENTED: NotOfferedError,
    code_pb2.UNAUTHENTICATED: BadTokenError,
    code_pb2.PERMISSION_DENIED: ForbiddenError,
    # Of foreign servers only environments are asked for what may be gone, or out of turn.
    code_pb2.NOT_FOUND: UnknownSessionError,
    code_pb2.FAILED_PRECONDITION: TurnConflictError,
}
_BROKEN_CONNECTION = ("Internal error from Core", "Received RST_STREAM", "Stream removed")
"""Messages of gRPC itself, under INTERNAL or UNKNOWN, when a connection breaks in the middle of a message."""


def _cut(text: str, max_bytes: int) -> str:
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def to_status(error: PenstockError) -> status_pb2.Status:
    """The google.rpc.Status a server answers with."""
    metadata = {key: _cut(value, MAX_METADATA_BYTES) for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(code=error.code, message=_cut(str(error), MAX_MESSAGE_BYTES), details=[detail])


def from_rpc_error(error: grpc.aio.AioRpcError, *, peer: str) -> PenstockError:
    """The error a call ended with, as the class the server raised; a foreign server's error by its status code."""
    code: int = error.code().value[0]
    message = f"{peer}: {error.details() or error.code().name}"
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:
        status = None
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN and info.reason in _BY_REASON:
            return _BY_REASON[info.reason](message, **dict(info.metadata))
    if code in (code_pb2.INTERNAL, code_pb2.UNKNOWN) and (error.details() or "").startswith(_BROKEN_CONNECTION):
        return ServiceUnavailableError(message)
    return _BY_CODE.get(code, InternalError)(message)
