"""Submits any number of prompts, in calls within the size limit, with retries while the broker's queue is full."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.errors import QueueFullError, RefusedError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.pieces import batched

MAX_PROMPTS_PER_CALL = 1024
MAX_PROMPT_BYTES_PER_CALL = 900 * 1024
"""Slightly under the broker's limit of 1 MiB per request, to leave space for the rest of the message."""
DEFAULT_RETRY_DELAY_S = 0.5


async def submit_all(
    submit: Callable[[Sequence[types_pb2.Prompt]], Awaitable[broker_pb2.SubmitPromptsResponse]],
    prompts: Sequence[types_pb2.Prompt],
) -> None:
    """Submit all prompts; returns once the broker has them.

    Args:
        submit: Makes one call.
        prompts: What to submit, in order.

    Raises:
        RefusedError: The broker refused a prompt for good; the earlier ones are submitted.
    """
    waiting = list(prompts)
    is_full = False
    while waiting:
        # Prompts refused by a full queue were sent, parsed and forecast in vain.
        most = 1 if is_full else MAX_PROMPTS_PER_CALL
        sent = next(batched(waiting, types_pb2.Prompt.ByteSize, MAX_PROMPT_BYTES_PER_CALL, most_items=most))
        waiting = waiting[len(sent) :]
        response = await submit(sent)
        refused = _refused(sent, response)
        is_full = bool(refused)
        if is_full:
            waiting = refused + waiting
            delay_s = response.retry_delay.ToTimedelta().total_seconds()
            await asyncio.sleep(delay_s or DEFAULT_RETRY_DELAY_S)


def _refused(sent: Sequence[types_pb2.Prompt], response: broker_pb2.SubmitPromptsResponse) -> list[types_pb2.Prompt]:
    """The prompts to send again."""
    for error in response.errors:
        if error.reason != QueueFullError.reason:
            group_id = sent[error.index].group_id if error.index < len(sent) else "?"
            problem = f"prompt {group_id}: {error.message}"
            raise RefusedError(f"the broker refused {problem}", refusals=[problem], reason=error.reason)
    refused = {error.index for error in response.errors}
    return [prompt for index, prompt in enumerate(sent) if index in refused]
