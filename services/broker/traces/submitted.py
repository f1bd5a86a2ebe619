"""Samples groups as they are submitted, and records who submitted those that were."""

from __future__ import annotations

from penstock import tracing
from penstock.tracing.recording import ratio
from penstock.v1 import broker_pb2


def mark_sampled(request: broker_pb2.SubmitPromptsRequest) -> None:
    """Set each prompt's trace context, whatever its client wrote there; repeated requests get the same."""
    share = ratio()
    for prompt in request.prompts:
        traceparent = tracing.traceparent_of(request.run_id, prompt.group_id, share) if share else ""
        if traceparent or prompt.traceparent:
            prompt.traceparent = traceparent


def record_submission(request: broker_pb2.SubmitPromptsRequest, *, start_s: float, end_s: float) -> None:
    """A span of the call, within that of its caller, with links to the groups that are sampled."""
    if not tracing.is_on():
        return
    links = [context for prompt in request.prompts if (context := tracing.read_traceparent(prompt.traceparent))]
    if links:
        tracing.record(
            tracing.Span(
                name="rl.submit",
                run_id=request.run_id,
                start_s=start_s,
                end_s=end_s,
                parent=tracing.current(),
                attributes={"rl.submit.groups": len(request.prompts)},
                links=links,
            )
        )
