"""Defines the OpenAI-compatible endpoint's refusals, in OpenAI's form."""

from __future__ import annotations

import math

ELSEWHERE = "session_elsewhere"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refusal; its message names the field, the value and the fix.

    Args:
        status: HTTP status. OpenAI's clients retry 408, 409, 429 and 5xx by themselves, so these are used only if a
            retry may help.
        message: Readable text.
        code: Machine-readable code.
        param: The field at fault.
        retry_after_s: When a retry may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Retry-After, in whole seconds, if set."""
        return {} if self.retry_after_s is None else {"Retry-After": str(math.ceil(self.retry_after_s))}


def invalid(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """400: a field is at fault."""
    return ApiError(400, f"{param}: {message}", code=code, param=param)


def elsewhere(message: str) -> ApiError:
    """409: another generator has the session."""
    return ApiError(409, message, code=ELSEWHERE, retry_after_s=1.0)


def unavailable(message: str, *, retry_after_s: float = 1.0) -> ApiError:
    """503: not now."""
    return ApiError(503, message, code="unavailable", retry_after_s=retry_after_s)
