"""Tokens held back in the engine process: merged in order, none lost, none twice, and sent when they are due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from services.generator.engines.vllm.output_buffer import BufferedOutputs


class Logprobs(NamedTuple):
    """As vLLM's `LogprobsLists`."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class Output:
    """The fields of vLLM's `EngineCoreOutput` that are merged, and one that is not."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    events: list[str] | None = None
    prefill_stats: str | None = None
    routed_experts: np.ndarray | None = None


def sampled(request_id: str, token_id: int, *, finish: str | None = None, **fields: Any) -> Output:
    column = np.array([[token_id]])
    return Output(
        request_id,
        [token_id],
        Logprobs(column, -column.astype(np.float32) / 10, np.array([token_id + 1])),
        finish_reason=finish,
        **fields,
    )


def test_the_first_step_is_sent_and_then_all_of_them_together() -> None:
    held = BufferedOutputs(3)
    sent = []
    for step in range(7):
        outputs = held.take([sampled("a", step), sampled("b", 10 + step)])
        sent.append([(output.request_id, output.new_token_ids) for output in outputs])
    assert sent == [
        [("a", [0]), ("b", [10])],
        [],
        [],
        [("a", [1, 2, 3]), ("b", [11, 12, 13])],
        [],
        [],
        [("a", [4, 5, 6]), ("b", [14, 15, 16])],
    ]
    assert not held


def test_log_probs_and_fields_of_a_single_step_survive_the_merging() -> None:
    held = BufferedOutputs(3)
    held.take([])
    held.take([sampled("a", 1, events=["queued"], prefill_stats="prefilled")])
    held.take([sampled("a", 2, events=["preempted"])])
    (output,) = held.take([sampled("a", 3, finish="stop", stop_reason=3)])
    assert output.new_token_ids == [1, 2, 3]
    assert output.new_logprobs.logprob_token_ids.tolist() == [[1], [2], [3]]
    assert output.new_logprobs.logprobs[:, 0].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert output.new_logprobs.sampled_token_ranks.tolist() == [2, 3, 4]
    assert (output.finish_reason, output.stop_reason) == ("stop", 3)
    assert (output.events, output.prefill_stats) == (["queued", "preempted"], "prefilled")


def test_a_sample_that_ends_is_sent_at_once_with_its_own_held_outputs_only() -> None:
    held = BufferedOutputs(100)
    held.take([])
    held.take([sampled("a", 1), sampled("b", 11)])
    (output,) = held.take([sampled("a", 2, finish="length"), sampled("b", 12)])
    assert (output.request_id, output.new_token_ids) == ("a", [1, 2])
    held.send_next()
    (output,) = held.take([])
    assert (output.request_id, output.new_token_ids) == ("b", [11, 12])
    assert not held


def test_what_was_aborted_is_not_sent() -> None:
    held = BufferedOutputs(100)
    held.take([])
    held.take([sampled("a", 1), sampled("b", 11)])
    held.forget(["a", "unknown"])
    held.send_next()
    assert [output.request_id for output in held.take([])] == ["b"]


def test_holding_for_one_step_is_not_holding() -> None:
    held = BufferedOutputs(1)
    for step in range(3):
        (output,) = held.take([sampled("a", step)])
        assert output.new_token_ids == [step]


def test_holding_for_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0"):
        BufferedOutputs(0)
