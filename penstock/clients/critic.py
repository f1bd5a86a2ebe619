"""Calls a critic of its own as a run's trainer: values, gradients and steps, over its restarts.

Invariants:
- Every number comes from the critic at the position of the call: a critic that was started again is first brought back
  to it, and a gradient that it lost is computed again from the same packs.
- A step is confirmed once, and is then on the critic's disk.
- A critic that is away is waited for, as long as `patience_s` allows; `outage` says so.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np

from penstock.errors import OffsetMismatchError, UnknownRunError, require
from penstock.network.connection import Connection
from penstock.network.outage import Outage
from penstock.network.rpc import call_with_retry
from penstock.security import NO_SECURITY, Security
from penstock.v1 import critic_pb2, critic_pb2_grpc
from penstock.wire.codec import Float32, float32_array

LOADING_S = 1800.0
"""Longest OpenCritic: a large model is loaded, and steps since its checkpoint are taken again."""
PASS_S = 600.0
"""Longest pass over a pack."""


class CriticClient(Connection):
    """The critic of one run, in one trainer; its calls are made one after the other.

    Args:
        target: Its address, host:port, or a channel to it.
        security: Certificates and token, if `target` is an address.
        opening: Of the run and its optimiser; its place is that at which the trainer begins.
        patience_s: How long an absent critic is waited for; None forever.
        on_outage: Called with a line while it is away, and with an empty one when it is back.
    """

    def __init__(
        self,
        target: str | grpc.aio.Channel,
        opening: critic_pb2.OpenCriticRequest,
        *,
        security: Security = NO_SECURITY,
        patience_s: float | None,
        on_outage: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(target, security=security, service="critic")
        self.outage = Outage(self.peer, on_notice=on_outage)
        """Whether it is away."""
        self.oldest_policy_version = opening.oldest_policy_version
        """The oldest version to which the trainer may go back."""
        self._opening = opening
        self._patience_s = patience_s
        self._stub = critic_pb2_grpc.CriticServiceStub(self.channel)
        self._one_call = asyncio.Lock()
        """Held by each call, so that one that is given up has ended before the next."""
        self._gradient_id = 1
        self._packs: list[critic_pb2.CriticPack] = []
        """Of the gradient under way."""
        self._answers: list[critic_pb2.AccumulateGradientResponse] = []
        """Those of the first of them, as far as the critic has them."""

    @property
    def minibatch(self) -> int:
        """Optimiser steps that were taken in the step under way."""
        return int(self._opening.place.minibatch)

    @property
    def gradient_norm(self) -> float:
        """Norm of the mean gradient over all packs so far; 0 without any."""
        return self._answers[-1].gradient_norm if self._answers else 0.0

    async def open(self) -> critic_pb2.OpenCriticResponse:
        """Bring the critic to the trainer's place; raises what the call may, see critic.proto."""
        async with self._one_call:
            return await self._open()

    async def evaluate(self, packs: Sequence[critic_pb2.CriticPack]) -> list[Float32]:
        """Values of packs, in their order, float32[N] each; whether they are finite is not checked."""
        async with self._one_call:
            return [await self._evaluate(pack) for pack in packs]

    async def accumulate(self, packs: Sequence[critic_pb2.CriticPack]) -> float:
        """Add packs to the gradient; returns the sum of their losses, which is not finite if a pack was not added."""
        async with self._one_call:
            first = len(self._packs)
            self._packs.extend(packs)
            await self._catch_up()
            return sum(answer.value_loss for answer in self._answers[first:])

    async def step(self, *, rate_factor: float, is_last: bool) -> None:
        """Take the optimiser step; on return it is on the critic's disk."""
        async with self._one_call:
            await self._step(rate_factor=rate_factor, is_last=is_last)

    async def discard(self) -> None:
        """Give the gradient up."""
        async with self._one_call:
            self._forget_gradient()

    async def _open(self) -> critic_pb2.OpenCriticResponse:
        self._answers = []
        self._opening.oldest_policy_version = self.oldest_policy_version
        response: critic_pb2.OpenCriticResponse = await self._call(
            self._stub.OpenCritic, self._opening, timeout_s=LOADING_S
        )
        return response

    async def _step(self, *, rate_factor: float, is_last: bool) -> None:
        while True:
            await self._catch_up()
            require(self._is_finite, f"{self.peer}: value_loss", "not finite", "as before the critic was started again")
            request = critic_pb2.StepCriticRequest(
                run_id=self._opening.run_id,
                place=self._opening.place,
                gradient_id=self._gradient_id,
                num_packs=len(self._packs),
                rate_factor=rate_factor,
                is_last=is_last,
                oldest_policy_version=self.oldest_policy_version,
            )
            try:
                await self._call(self._stub.StepCritic, request, timeout_s=PASS_S)
                break
            except UnknownRunError:
                await self._open()
            except OffsetMismatchError:
                self._begin_again()
        place = self._opening.place
        if is_last:
            place.policy_version, place.minibatch = place.policy_version + 1, 0
        else:
            place.minibatch += 1
        self._forget_gradient()

    async def _evaluate(self, pack: critic_pb2.CriticPack) -> Float32:
        request = critic_pb2.EvaluatePackRequest(run_id=self._opening.run_id, place=self._opening.place, pack=pack)
        while True:
            try:
                answer = await self._call(self._stub.EvaluatePack, request, timeout_s=PASS_S)
            except UnknownRunError:
                await self._open()
                continue
            values = float32_array(answer.values, "values")
            num_targets = len(pack.target_positions) // np.dtype(np.int32).itemsize
            require(
                values.size == num_targets, "values", f"{values.size} of {self.peer}", f"{num_targets} for this pack"
            )
            return values

    async def _catch_up(self) -> None:
        """Send the packs that the critic does not have, up to one that it does not add: its loss is not finite."""
        while self._is_finite and (index := len(self._answers)) < len(self._packs):
            request = critic_pb2.AccumulateGradientRequest(
                run_id=self._opening.run_id,
                place=self._opening.place,
                gradient_id=self._gradient_id,
                index=index,
                pack=self._packs[index],
            )
            try:
                self._answers.append(await self._call(self._stub.AccumulateGradient, request, timeout_s=PASS_S))
            except UnknownRunError:
                await self._open()
            except OffsetMismatchError:
                self._begin_again()

    @property
    def _is_finite(self) -> bool:
        return not self._answers or math.isfinite(self._answers[-1].value_loss)

    def _begin_again(self) -> None:
        """The critic is to compute the gradient from its first pack."""
        self._gradient_id += 1
        self._answers = []

    def _forget_gradient(self) -> None:
        self._packs = []
        self._begin_again()

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, *, timeout_s: float) -> Any:
        return await call_with_retry(
            method,
            request,
            peer=self.outage.peer,
            timeout_s=timeout_s,
            give_up_after_s=self._patience_s,
            outage=self.outage,
        )
