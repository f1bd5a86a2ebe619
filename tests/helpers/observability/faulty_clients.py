"""Clients of a broker that do what alerts tell of, played by hand on real streams, each until it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import grpc

from penstock.v1 import broker_pb2_grpc, types_pb2
from tests.helpers.brokers.broker import Generator, RunningBroker, Trainer, Worker, chunk, prompt

EVERY_S = 0.1


def called(channel: grpc.aio.Channel) -> RunningBroker:
    """The calls of a broker in a process of its own."""
    return RunningBroker(None, None, None, channel, broker_pb2_grpc.BrokerServiceStub(channel))


@asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Inside the block the work goes on; an error of it ends the block."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        yield
        task.cancel()


async def repeat_prompts(broker: RunningBroker, run_id: str) -> None:
    """Submit one prompt again and again, as if no answer had arrived."""
    while True:
        await broker.submit(prompt("again"), run_id=run_id)
        await asyncio.sleep(EVERY_S)


async def submit_too_much(broker: RunningBroker, run_id: str) -> None:
    """Submit more than the run lets wait, and ignore the retry delay."""
    for number in count():
        await broker.submit(*(prompt(f"too-much-{number}-{index}") for index in range(64)), run_id=run_id)
        await asyncio.sleep(EVERY_S)


async def send_tokens_again(generator: Generator) -> None:
    """Lease a sample, and send what does not follow on what was stored."""
    generator.beat(credits=1)
    [lease] = await generator.leases(1)
    while True:
        errors = await generator.put(chunk(lease, [7, 8], version=generator.version, offset=5))
        assert [error.reason for error in errors] == ["OFFSET_MISMATCH"]
        await asyncio.sleep(EVERY_S)


async def claim_future_weights(generator: Generator) -> None:
    """Send one chunk of a version that the run has not reached."""
    generator.beat(credits=1)
    [lease] = await generator.leases(1)
    errors = await generator.put(chunk(lease, [7], version=99))
    assert len(errors) == 1, errors


async def lease_and_vanish(channel: grpc.aio.Channel, run_id: str) -> None:
    """Take leases and break off, as generators do that die, under another name each time."""
    for number in count():
        generator = Generator.connect(channel, f"dying-{number}", run_id=run_id)
        generator.beat(credits=2)
        with suppress(TimeoutError):
            await generator.leases(1)
        generator.stream.call.cancel()
        generator.tokens.call.cancel()
        await asyncio.sleep(EVERY_S)


class LivingRun:
    """A run whose prompts, generator and trainer are played by hand: steps as fast as samples are scored.

    Args:
        scores: Whether its reward worker is played, too.
    """

    def __init__(self, channel: grpc.aio.Channel, run_id: str, *, scores: bool) -> None:
        self._broker, self.run_id = called(channel), run_id
        self._generator = Generator.connect(channel, "living", run_id=run_id, lasts_s=None)
        self._trainer = Trainer.connect(channel, run_id=run_id, lasts_s=None)
        self._worker = Worker.connect(channel, run_id=run_id, lasts_s=None) if scores else None
        self.version = 0

    async def step(self) -> None:
        """One step of two groups of two samples."""
        names = [f"{self.run_id}-{self.version}-{index}" for index in range(2)]
        assert not (await self._broker.submit(*map(prompt, names), run_id=self.run_id)).errors
        self._generator.beat(credits=4, version=self.version)
        await self._generator.finish(await self._generator.leases(4))
        if self._worker is not None:
            await self._worker.score(4)
        groups = await self._trainer.groups(2)
        self.version += 1
        await self._trainer.ack([group.prompt.group_id for group in groups], self.version, run_id=self.run_id)

    async def flow(self) -> None:
        """Prompts, samples and steps each as fast as they go, also where groups lose samples on the way."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self._submit, self._beat, self._generate, self._train):
                tasks.create_task(work())

    async def _submit(self) -> None:
        for number in count():
            await self._broker.submit(prompt(f"{self.run_id}-{number}"), run_id=self.run_id)
            await asyncio.sleep(EVERY_S)

    async def _beat(self) -> None:
        while True:
            self._generator.beat(version=self.version)
            await asyncio.sleep(1.0)

    async def _generate(self) -> None:
        while True:
            self._generator.beat(credits=1, version=self.version)
            [lease] = await self._generator.leases(1)
            # Refused where its group was dropped meanwhile.
            await self._generator.put(
                chunk(lease, [7, 8, 9], version=self.version, finish=types_pb2.FINISH_REASON_STOP)
            )

    async def _train(self) -> None:
        while True:
            groups = await self._trainer.groups(2)
            names = [group.prompt.group_id for group in groups]
            await self._trainer.ack(names, self.version + 1, run_id=self.run_id)
            self.version += 1

    async def go_on(self, *, every_s: float = EVERY_S) -> None:
        """Step after step."""
        while True:
            await self.step()
            await asyncio.sleep(every_s)
