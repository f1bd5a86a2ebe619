"""Asks reward workers how fast they score while they are busy, for the scheduler's revisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from statistics import median

from penstock.errors import PenstockError
from penstock.network.rpc import call, open_channel
from penstock.security import Security
from penstock.v1 import reward_pb2, reward_pb2_grpc
from penstock.v1 import scheduler_pb2 as pb

ASK_EVERY_S = 10.0
"""As long as the least that is measured."""
_TIMEOUT_S = 3.0


class RewardMeter:
    """Follows the reward workers of a machine.

    Args:
        run_id: The run that they score.
        targets: Addresses of those that are there now, host:port.
        security: Credentials of this process.
        time_scale: Emulated seconds per real second; rates are in emulated seconds.
    """

    def __init__(
        self, run_id: str, targets: Callable[[], Collection[str]], *, security: Security, time_scale: float = 1.0
    ) -> None:
        self._run_id, self._targets, self._security, self._time_scale = run_id, targets, security, time_scale
        self._found: dict[str, float] = {}

    def rates(self) -> list[pb.MeasuredRate]:
        """What one worker scores: the median of those that have been busy; empty if none was."""
        found = [rate for rate in self._found.values() if rate > 0]
        if not found:
            return []
        rate = median(found) / self._time_scale
        return [pb.MeasuredRate(role=pb.ROLE_REWARD, samples_per_second=rate, run_id=self._run_id)]

    async def keep_asking(self) -> None:
        """Ask until cancelled; those that do not answer keep what they said."""
        while True:
            there = self._targets()
            self._found = {target: rate for target, rate in self._found.items() if target in there}
            await asyncio.gather(*map(self._ask, there))
            await asyncio.sleep(ASK_EVERY_S)

    async def _ask(self, target: str) -> None:
        request = reward_pb2.GetRewardModelRequest()
        try:
            async with open_channel(target, self._security) as channel:
                stub = reward_pb2_grpc.RewardServiceStub(channel)
                said = await call(stub.GetRewardModel, request, peer=f"reward worker {target}", timeout_s=_TIMEOUT_S)
        except PenstockError:
            # It is starting or ending; its supervisor looks after it.
            return
        self._found[target] = said.samples_per_second
