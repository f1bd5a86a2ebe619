"""Statuses of calls, as the errors that clients act on."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from penstock.errors import InternalError, PenstockError, ServiceUnavailableError, from_rpc_error


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.INTERNAL, "Internal error from Core", ServiceUnavailableError),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", ServiceUnavailableError),
        (grpc.StatusCode.UNKNOWN, "Stream removed", ServiceUnavailableError),
        (grpc.StatusCode.CANCELLED, "", ServiceUnavailableError),
        (grpc.StatusCode.INTERNAL, "the model fell over", InternalError),
        (grpc.StatusCode.UNKNOWN, "Unexpected <class 'KeyError'>", InternalError),
    ],
)
def test_a_broken_connection_is_worth_another_try_and_a_fault_is_not(
    code: grpc.StatusCode, details: str, expected: type[PenstockError]
) -> None:
    error = from_rpc_error(AioRpcError(code, Metadata(), Metadata(), details), peer="broker")
    assert type(error) is expected
    assert details in str(error)
