"""Programs and their tests as messages of SandboxService."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from penstock.errors import InvalidFieldError
from penstock.v1 import sandbox_pb2
from services.reward.code.cell import Job
from services.reward.code.sandboxes.sandbox import Limits
from services.reward.code.suites import MAX_TESTS, Assertions, Calls, Streams, Suite

MAX_TEXT_BYTES = 1024 * 1024
"""Of a program, and of its tests as JSON."""
_KINDS: dict[sandbox_pb2.TestsKind.ValueType, type[Suite]] = {
    sandbox_pb2.TESTS_KIND_STREAMS: Streams,
    sandbox_pb2.TESTS_KIND_CALLS: Calls,
    sandbox_pb2.TESTS_KIND_ASSERTIONS: Assertions,
}
_LIMITS = ("cpu_s", "wall_s", "memory_bytes", "max_processes", "output_bytes")


def job_request(job: Job) -> sandbox_pb2.RunProgramRequest:
    """A program and its tests, but for how this machine would run it."""
    [kind] = (number for number, each in _KINDS.items() if each is type(job.suite))
    return sandbox_pb2.RunProgramRequest(
        # Half of a surrogate pair is no text on the wire; a file would not hold it either.
        program=job.program.encode("utf-8", "replace").decode(),
        tests_kind=kind,
        tests_json=json.dumps(asdict(job.suite)),
        limits=limits_message(job.limits),
        stops_early=job.stops_early,
    )


def read_job(
    request: sandbox_pb2.RunProgramRequest, *, most: Limits, command: Sequence[str], readable: Sequence[str]
) -> Job:
    """The job that was sent, to be run by this machine's command. Raises InvalidFieldError."""
    for field in ("program", "tests_json"):
        if len(getattr(request, field).encode()) > MAX_TEXT_BYTES:
            raise InvalidFieldError(f"{field}: more than {MAX_TEXT_BYTES} bytes", field=field)
    if problem := excess(_limits(request.limits), limits_message(most)):
        raise InvalidFieldError(f"limits.{problem}", field="limits")
    return Job(
        program=request.program,
        suite=_suite(request),
        command=command,
        readable=readable,
        limits=_limits(request.limits),
        stops_early=request.stops_early,
    )


def limits_message(limits: Limits) -> sandbox_pb2.ProgramLimits:
    """Limits as a message."""
    return sandbox_pb2.ProgramLimits(**{name: getattr(limits, name) for name in _LIMITS})


def excess(asked: Limits, most: sandbox_pb2.ProgramLimits) -> str:
    """The first limit that is more than the most, or nothing at all, in words; empty if all can be given."""
    for name in _LIMITS:
        value, bound = getattr(asked, name), getattr(most, name)
        if not 0 < value <= bound:
            return f"{name}: {value:g} is asked for, more than 0 and at most {bound:g} is allowed"
    return ""


def _limits(message: sandbox_pb2.ProgramLimits) -> Limits:
    return Limits(**{name: getattr(message, name) for name in _LIMITS})


def _suite(request: sandbox_pb2.RunProgramRequest) -> Suite:
    kind = _KINDS.get(request.tests_kind)
    if kind is None:
        raise InvalidFieldError(f"tests_kind: {request.tests_kind} is none", field="tests_kind")
    try:
        suite: Suite = TypeAdapter(kind).validate_json(request.tests_json, strict=True)
    except (ValidationError, RecursionError) as error:
        raise InvalidFieldError(f"tests_json: {str(error)[:300]}", field="tests_json") from error
    given = {Streams: "inputs", Calls: "arguments"}.get(kind)
    if given is not None and len(getattr(suite, given)) != suite.num_tests:
        raise InvalidFieldError(f"tests_json: {given} and results differ in number", field="tests_json")
    if isinstance(suite, Calls) and not suite.function.isidentifier():
        raise InvalidFieldError(f"tests_json: function {suite.function!r:.80} is no name", field="tests_json")
    if not 1 <= suite.num_tests <= MAX_TESTS:
        raise InvalidFieldError(f"tests_json: {suite.num_tests} tests, must be 1 to {MAX_TESTS}", field="tests_json")
    return suite
