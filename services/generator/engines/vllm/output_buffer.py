"""Tokens that an engine process holds back, so that a message to this process carries many of a sample at once.

vLLM sends what every step sampled, a message a step with three arrays a sample, and puts it together on the other side,
where its `stream_interval` only decides when the caller hears of it. Here tokens are put together before they are sent.
Pure; knows of vLLM's outputs only the fields it merges, and is used in its engine process by `vllm_scheduler`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


class BufferedOutputs:
    """What was sampled and not sent yet, by sample and in order.

    A sample that ends takes along what is held of it, at once. All others are sent together: at the first step, after
    every `num_steps` steps, and at the step after `send_next`.
    """

    def __init__(self, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"outputs can be held for one step or more, got {num_steps}")
        self._num_steps = num_steps
        self._num_held_steps = num_steps
        self._held: dict[str, list[Any]] = {}

    def __bool__(self) -> bool:
        """Whether anything is held."""
        return bool(self._held)

    def send_next(self) -> None:
        """The next step's outputs are sent, with all that is held."""
        self._num_held_steps = self._num_steps

    def forget(self, request_ids: Iterable[str]) -> None:
        """These were aborted: nobody waits for their tokens."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def take(self, outputs: Iterable[Any]) -> list[Any]:
        """One step's outputs (vLLM's `EngineCoreOutput`); what is sent now, one output a sample."""
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
    """One output with the tokens of all, made of the last; they are one sample's, oldest first, at least one."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last.new_token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
    last.new_logprobs = _joined([output.new_logprobs for output in outputs if output.new_logprobs is not None])
    last.events = [event for output in outputs for event in output.events or ()] or None
    last.prefill_stats = next((output.prefill_stats for output in outputs if output.prefill_stats is not None), None)
    return last


def _joined(parts: list[Any]) -> Any:
    """The log-probs (vLLM's `LogprobsLists`) of consecutive tokens as one."""
    if len(parts) < 2:
        return parts[0] if parts else None
    token_ids, logprobs, ranks, _ = zip(*parts, strict=True)
    return type(parts[0])(np.concatenate(token_ids), np.concatenate(logprobs), np.concatenate(ranks), None)
