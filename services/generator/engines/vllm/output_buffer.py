"""Buffers tokens in the engine process, so that each message to this process carries many of a sample.

vLLM sends the tokens of every step, one message per step with three arrays per sample, and merges them on receipt; its
`stream_interval` only decides when the caller gets them. Here tokens are merged before they are sent. Pure; depends
only on the merged fields of vLLM's outputs, and is used in vLLM's engine process by `output_scheduler`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


class BufferedOutputs:
    """Tokens sampled but not yet sent, by sample and in order.

    When a sample ends, its buffered tokens are sent at once. All others are sent together: at the first step, after
    every `num_steps` steps, and at the step after `send_next`.
    """

    def __init__(self, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"outputs can be held for one step or more, got {num_steps}")
        self._num_steps = num_steps
        self._num_held_steps = num_steps
        self._held: dict[str, list[Any]] = {}

    def __bool__(self) -> bool:
        """Whether any tokens are buffered."""
        return bool(self._held)

    def send_next(self) -> None:
        """Send the next step's outputs with all buffered ones."""
        self._num_held_steps = self._num_steps

    def forget(self, request_ids: Iterable[str]) -> None:
        """Discard the tokens of these aborted requests."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def take(self, outputs: Iterable[Any]) -> list[Any]:
        """Add one step's outputs (vLLM's `EngineCoreOutput`); returns those to send now, one per sample."""
        is_due = self._num_held_steps + 1 >= self._num_steps
        self._num_held_steps = 0 if is_due else self._num_held_steps + 1
        ended = []
        for output in outputs:
            if output.finish_reason is not None:
                ended.append(merged([*self._held.pop(output.request_id, ()), output]))
            else:
                self._held.setdefault(output.request_id, []).append(output)
        if not is_due:
            return ended
        held, self._held = self._held, {}
        return [*ended, *(merged(parts) for parts in held.values())]


def merged(outputs: list[Any]) -> Any:
    """Merge one sample's outputs, oldest first and at least one, into the last."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last.new_token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
    last.new_logprobs = _joined([output.new_logprobs for output in outputs if output.new_logprobs is not None])
    routes = [output.routed_experts for output in outputs if output.routed_experts is not None]
    last.routed_experts = np.concatenate(routes) if routes else None
    last.events = [event for output in outputs for event in output.events or ()] or None
    last.prefill_stats = next((output.prefill_stats for output in outputs if output.prefill_stats is not None), None)
    return last


def _joined(parts: list[Any]) -> Any:
    """Concatenate the log-probs (vLLM's `LogprobsLists`) of consecutive tokens."""
    if len(parts) < 2:
        return parts[0] if parts else None
    token_ids, logprobs, ranks, _ = zip(*parts, strict=True)
    return type(parts[0])(np.concatenate(token_ids), np.concatenate(logprobs), np.concatenate(ranks), None)
