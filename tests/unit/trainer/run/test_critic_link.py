"""The compute thread's waits for a critic: what they are worth saying, and what ends them."""

from __future__ import annotations

import asyncio

import pytest

from penstock.network.outage import Outage
from services.trainer.compute.compute_thread import Interrupt, InterruptedComputeError
from services.trainer.run import critic_link
from services.trainer.run.critic_link import CriticLink
from tests.helpers.waiting import until


class SlowClient:
    """Answers once it may."""

    peer, oldest_policy_version, minibatch, gradient_norm = "critic far:7309", 0, 0, 1.0

    def __init__(self):
        self.outage = Outage(self.peer)
        self.may_answer = asyncio.Event()
        self.is_given_up = False

    async def accumulate(self, packs):
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.is_given_up = True
            raise
        return 5.0


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    monkeypatch.setattr(critic_link, "POLL_S", 0.01)
    monkeypatch.setattr(critic_link, "NOTICE_S", 0.02)


def link_to(client, said, *, check=lambda: None):
    loop = asyncio.get_running_loop()
    return CriticLink(client, loop=loop, check=check, keep_checkpoints=2, on_wait=said.append)


async def test_a_critic_that_takes_long_is_named_until_it_has_answered():
    client, said = SlowClient(), []
    link = link_to(client, said)
    answer = asyncio.create_task(asyncio.to_thread(lambda: link.wait_for(link.begin_gradient([]))))
    await until(lambda: bool(said))
    assert said[0].startswith("waiting for critic far:7309 for 0 s: it is loading")
    client.may_answer.set()
    assert await answer == 5.0
    await until(lambda: not said[-1])
    assert link.take_waited_s() >= 0.02
    assert link.take_waited_s() == 0.0


async def test_a_stop_ends_the_wait_and_the_call():
    client, interrupt = SlowClient(), Interrupt()
    link = link_to(client, [], check=interrupt.check)
    answer = asyncio.create_task(asyncio.to_thread(lambda: link.wait_for(link.begin_gradient([]))))
    interrupt.set()
    with pytest.raises(InterruptedComputeError):
        await answer
    await until(lambda: client.is_given_up)


async def test_the_critic_hears_of_the_oldest_checkpoint_that_the_trainer_keeps():
    client = SlowClient()
    link = link_to(client, [])
    found = []
    for version in (20, 40, 60):
        link.note_checkpoint(version)
        found.append(client.oldest_policy_version)
    assert found == [0, 20, 40]
