"""Plays the task's sessions as a generator does: over gRPC, with an environment that dies now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from benchmarks.trainer.lagging import decode, make_row
from benchmarks.turns.task import NUM_TURNS, VOCABULARY, NextLetter
from penstock.environments.serving import EnvironmentServicer, environment_service
from penstock.network.connection import Connection
from penstock.network.rpc import Server
from penstock.v1 import broker_pb2, environment_pb2, types_pb2
from services.generator.engine.engine import SamplingSettings
from services.generator.environments.client import EnvironmentClient
from services.generator.environments.config import EnvironmentLimits
from services.generator.environments.dialogue import Dialogue
from services.generator.environments.rendering import Renderer
from services.generator.environments.transcript import Transcript

SAMPLES_PER_STEP = 64
TURNS_BETWEEN_DEATHS = 12
"""Turns of all sessions after which the environment loses every session, in the middle of most of them."""
PROMPT = VOCABULARY.index("<bos>")


class Letters:
    """Text and tokens of the task: a token is a letter. Also a `Renderer`."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `TextDecoder.decode`."""
        return "".join(VOCABULARY[token_id] for token_id in token_ids)

    async def opening(self, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """See `Renderer.opening`."""
        return [VOCABULARY.index(message.content) for message in messages]

    async def answer(self, text: str, last_token_id: int, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """See `Renderer.answer`."""
        del text, last_token_id
        return await self.opening(messages)


class DyingEnvironment(EnvironmentServicer):
    """The task's environment, which `die` makes forget every session, as a restart of its process does."""

    def __init__(self, task: type[NextLetter]) -> None:
        super().__init__(task)
        self.num_deaths = 0

    def die(self) -> None:
        """Lose every session."""
        self.num_deaths += 1
        for name in list(self._sessions):
            self._drop(name)


@dataclass(slots=True)
class Played:
    """One sample."""

    dialogue: Dialogue
    group_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], logprob: float, *, is_sampled: bool) -> None:
        """Append tokens."""
        self.tokens += token_ids
        self.logprobs += [logprob] * len(token_ids)
        self.mask += [is_sampled] * len(token_ids)


class Players:
    """Plays the sessions of one step after another, in groups of `group_size`."""

    def __init__(self, client: EnvironmentClient, environment: DyingEnvironment, *, group_size: int) -> None:
        self._client = client
        self._environment = environment
        self._group_size = group_size
        self._num_turns = 0

    async def play(self, model: torch.nn.Module, *, seed: int, version: int) -> list[list[Played]]:
        """The groups of a step, sampled by the model."""
        num_groups = SAMPLES_PER_STEP // self._group_size
        first = (seed << 20) + version * num_groups
        groups = [
            [self._session(first + number, index) for index in range(self._group_size)] for number in range(num_groups)
        ]
        every = [played for siblings in groups for played in siblings]
        await asyncio.gather(*(self._open(played) for played in every))
        for turn in range(NUM_TURNS):
            rows = [
                make_row(
                    (PROMPT, *played.tokens),
                    SamplingSettings(max_new_tokens=1, seed=(first * len(every) + index) * NUM_TURNS + turn),
                )
                for index, played in enumerate(every)
            ]
            decode(model, rows)
            self._num_turns += 1
            if self._num_turns % TURNS_BETWEEN_DEATHS == 0:
                self._environment.die()
            answers = zip(every, rows, strict=True)
            await asyncio.gather(
                *(self._take(played, row.new_token_ids[0], row.new_logprobs[0]) for played, row in answers)
            )
        await asyncio.gather(*(played.dialogue.close() for played in every))
        return groups

    def _session(self, seed: int, index: int) -> Played:
        letters = Letters()
        lease = broker_pb2.Lease(
            key=types_pb2.SampleKey(group_id=str(seed), sample_index=index),
            prompt=types_pb2.Prompt(group_id=str(seed), sampling=types_pb2.SamplingParams(seed=seed)),
        )

        def render(_description: environment_pb2.GetEnvironmentResponse) -> Renderer:
            return letters

        return Played(Dialogue(self._client, render, letters, lease, run_id="turns", instance_id=""), str(seed))

    async def _open(self, played: Played) -> None:
        answer = await played.dialogue.open(Transcript(opening=(), turns=()), is_complete=False)
        played.add(answer.given, 0.0, is_sampled=False)

    async def _take(self, played: Played, token_id: int, logprob: float) -> None:
        played.add([token_id], logprob, is_sampled=True)
        answer = await played.dialogue.answer([token_id], types_pb2.FINISH_REASON_STOP)
        played.add(answer.given, 0.0, is_sampled=False)


@asynccontextmanager
async def players(task: type[NextLetter], *, group_size: int) -> AsyncIterator[tuple[Players, DyingEnvironment]]:
    """Players, and the environment that they talk with, for the length of one `async with`."""
    environment = DyingEnvironment(task)
    server = Server(listen="127.0.0.1:0", services=[environment_service(environment)])
    port = await server.start()
    try:
        async with Connection(f"127.0.0.1:{port}", service="environment") as connection:
            client = EnvironmentClient(connection, EnvironmentLimits())
            yield Players(client, environment, group_size=group_size), environment
    finally:
        await server.stop(grace_s=0)
        await environment.close()
