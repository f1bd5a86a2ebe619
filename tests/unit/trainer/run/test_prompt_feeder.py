"""Prompts are submitted until the broker has them, and a full queue is asked with little."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.clients.broker import BrokerClient
from penstock.errors import InvalidFieldError, QueueFullError
from penstock.v1 import broker_pb2, types_pb2
from services.trainer.run.prompt_feeder import PromptSubmitter


class FullBroker(BrokerClient):
    """A broker with a queue of `room` prompts, which a step empties after every third call."""

    def __init__(self, room: int, *, refuses: str = "") -> None:
        self.room = room
        self.refuses = refuses
        self.queued: list[str] = []
        self.taken: list[str] = []
        self.num_sent: list[int] = []

    async def submit_prompts(
        self, run_id: str, prompts: Sequence[types_pb2.Prompt]
    ) -> broker_pb2.SubmitPromptsResponse:
        response = broker_pb2.SubmitPromptsResponse()
        self.num_sent.append(len(prompts))
        for index, prompt in enumerate(prompts):
            if prompt.group_id == self.refuses:
                response.errors.add(index=index, reason="INVALID_FIELD", message="no")
            elif len(self.queued) < self.room:
                self.queued.append(prompt.group_id)
            else:
                response.errors.add(index=index, reason=QueueFullError.reason)
                response.retry_delay.FromMicroseconds(1)
        if len(self.num_sent) % 3 == 0:
            self.taken += self.queued
            self.queued.clear()
        return response


def prompts(num: int) -> list[types_pb2.Prompt]:
    return [types_pb2.Prompt(group_id=f"g{index}") for index in range(num)]


async def test_every_prompt_arrives_once_and_in_order_through_a_queue_that_is_full_most_of_the_time() -> None:
    broker = FullBroker(room=4)
    await PromptSubmitter(broker, "run").submit(prompts(20))
    assert [*broker.taken, *broker.queued] == [f"g{index}" for index in range(20)]


async def test_a_full_queue_is_asked_with_one_prompt_until_it_takes_one() -> None:
    broker = FullBroker(room=4)
    await PromptSubmitter(broker, "run").submit(prompts(10))
    # 4 of 10 are taken. One more is refused twice and taken after the step; of the others that follow, 3 have room.
    assert broker.num_sent == [10, 1, 1, 1, 5, 1, 1, 1]


async def test_a_prompt_that_is_refused_for_good_is_named() -> None:
    with pytest.raises(InvalidFieldError, match="refused prompt g2"):
        await PromptSubmitter(FullBroker(room=9, refuses="g2"), "run").submit(prompts(5))
