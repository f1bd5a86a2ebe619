"""Asks reward workers, scorers and a critic how fast they are while they are busy, for the scheduler's revisions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from statistics import median

import grpc

from console.node.scoring import CRITIC, REWARD, SCORER
from penstock.errors import PenstockError
from penstock.network.rpc import call, open_channel
from penstock.security import Security
from penstock.v1 import reward_pb2, reward_pb2_grpc, speed_pb2, speed_pb2_grpc
from penstock.v1 import scheduler_pb2 as pb

ASK_EVERY_S = 10.0
"""As long as the least that is measured."""
_TIMEOUT_S = 3.0


class ServiceMeter:
    """Follows the processes of a machine that score or value samples.

    Args:
        run_id: The run that they serve.
        targets: The kind of each that is there now, by its address, host:port.
        security: Credentials of this process.
        time_scale: Emulated seconds per real second; rates are in emulated seconds.
    """

    def __init__(
        self, run_id: str, targets: Callable[[], Mapping[str, str]], *, security: Security, time_scale: float = 1.0
    ) -> None:
        self._run_id, self._targets, self._security, self._time_scale = run_id, targets, security, time_scale
        self._found: dict[str, tuple[str, float]] = {}
        """Kind and rate by address."""

    def rates(self) -> list[pb.MeasuredRate]:
        """What one process of each kind does: the median of those that have been busy; empty if none was."""
        rates = []
        for kind, make in _RATES.items():
            found = [rate for its_kind, rate in self._found.values() if its_kind == kind and rate > 0]
            if found:
                rates.append(make(median(found) / self._time_scale, self._run_id))
        return rates

    async def keep_asking(self) -> None:
        """Ask until cancelled; those that do not answer keep what they said."""
        while True:
            there = self._targets()
            self._found = {target: found for target, found in self._found.items() if there.get(target) == found[0]}
            await asyncio.gather(*(self._ask(kind, target) for target, kind in there.items()))
            await asyncio.sleep(ASK_EVERY_S)

    async def _ask(self, kind: str, target: str) -> None:
        try:
            async with open_channel(target, self._security) as channel:
                rate = await _QUESTIONS[kind](channel, f"{kind} {target}")
        except PenstockError:
            # It is starting or ending, which is its supervisor's business.
            return
        self._found[target] = kind, rate


async def _samples_per_second(channel: grpc.aio.Channel, peer: str) -> float:
    stub, request = reward_pb2_grpc.RewardServiceStub(channel), reward_pb2.GetRewardModelRequest()
    return (await call(stub.GetRewardModel, request, peer=peer, timeout_s=_TIMEOUT_S)).samples_per_second


async def _tokens_per_second(channel: grpc.aio.Channel, peer: str) -> float:
    stub, request = speed_pb2_grpc.SpeedServiceStub(channel), speed_pb2.GetSpeedRequest()
    return (await call(stub.GetSpeed, request, peer=peer, timeout_s=_TIMEOUT_S)).tokens_per_second


_QUESTIONS: Mapping[str, Callable[[grpc.aio.Channel, str], Awaitable[float]]] = {
    REWARD: _samples_per_second,
    SCORER: _tokens_per_second,
    CRITIC: _tokens_per_second,
}
_RATES: Mapping[str, Callable[[float, str], pb.MeasuredRate]] = {
    REWARD: lambda rate, run_id: pb.MeasuredRate(role=pb.ROLE_REWARD, samples_per_second=rate, run_id=run_id),
    SCORER: lambda rate, run_id: pb.MeasuredRate(role=pb.ROLE_SCORER, tokens_per_second=rate, run_id=run_id),
    CRITIC: lambda rate, run_id: pb.MeasuredRate(role=pb.ROLE_CRITIC, tokens_per_second=rate, run_id=run_id),
}
