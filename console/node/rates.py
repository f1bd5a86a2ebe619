"""Measures the rates of a machine's generators, which `penstock node` reports to the scheduler with its heartbeats.

A generator counts its tokens and the seconds in which it decodes. The number of samples it decodes at once is polled
every second; these give the time between two tokens of a sample, whatever the load. Time spent swapping weights is
excluded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from penstock.errors import PenstockError
from penstock.network.rpc import call, open_channel
from penstock.security import Security
from penstock.v1 import generator_pb2, generator_pb2_grpc
from penstock.v1 import scheduler_pb2 as pb

MIN_BUSY_S = 10.0
"""Least decoding time behind a rate: pauses and bursts of a second or two do not make a machine slow."""
MIN_SESSIONS = 16
"""Least sessions behind a mean wait for an environment."""
_LOOK_EVERY_S = 1.0
_TIMEOUT_S = 3.0


_Layout = tuple[int, int]
"""Tensor-parallel degree and pipeline stages."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A generator of this machine."""

    target: str
    tensor_parallel: int
    pipeline_parallel: int = 1

    @property
    def layout(self) -> _Layout:
        """What its speed is measured under."""
        return self.tensor_parallel, self.pipeline_parallel


@dataclass(slots=True)
class _Window:
    """Work of the replicas of one layout since the last rate."""

    busy_s: float = 0.0
    sample_s: float = 0.0
    """Samples decoded at once, integrated over those seconds."""
    num_tokens: int = 0


class Meter:
    """Turns counters of generators into rates. Pure.

    Args:
        time_scale: Emulated seconds per real second; rates are in emulated seconds.
    """

    def __init__(self, *, time_scale: float = 1.0) -> None:
        self._time_scale = time_scale
        self._seen: dict[str, generator_pb2.GetGeneratorResponse] = {}
        self._windows: dict[_Layout, _Window] = {}
        self._rates: dict[_Layout, pb.MeasuredRate] = {}
        self._num_replicas: Counter[_Layout] = Counter()
        self._asked_s: dict[str, float] = {}
        self._waited_s, self._num_sessions = 0.0, 0
        """Of sessions with an environment since the last mean."""
        self._environment_wait_s: float | None = None
        self.start_s: float | None = None
        """How long the newest generator took to build its engine; None before the first one."""

    def begin(self, replica: Replica, now_s: float) -> None:
        """Record that a plan requested this replica at that time."""
        self._asked_s[replica.target] = now_s

    def see(self, replica: Replica, now: generator_pb2.GetGeneratorResponse, *, now_s: float) -> None:
        """Take in a replica's counters, which start again after a restart."""
        if now.state == generator_pb2.GENERATOR_STATE_SERVING and replica.target in self._asked_s:
            self.start_s = (now_s - self._asked_s.pop(replica.target)) * self._time_scale
        before, self._seen[replica.target] = self._seen.get(replica.target), now
        if before is None or before.generator_id != now.generator_id:
            return
        self._waited_s += now.total_environment_wait_s - before.total_environment_wait_s
        self._num_sessions += now.num_environment_sessions - before.num_environment_sessions
        if self._num_sessions >= MIN_SESSIONS:
            self._environment_wait_s = self._waited_s / self._num_sessions * self._time_scale
            self._waited_s, self._num_sessions = 0.0, 0
        at_once = [each.num_running for each in (before, now) if each.num_running]
        swap_s = now.total_swap_pause_s - before.total_swap_pause_s
        busy_s = max(0.0, now.busy_s - before.busy_s - swap_s)
        if not at_once or not busy_s:
            return
        window = self._windows.setdefault(replica.layout, _Window())
        window.busy_s += busy_s
        window.sample_s += busy_s * sum(at_once) / len(at_once)
        window.num_tokens += now.num_tokens_generated - before.num_tokens_generated

    def rates(self) -> list[pb.MeasuredRate]:
        """The newest rate of each layout; empty until enough was decoded."""
        for layout, window in list(self._windows.items()):
            if window.busy_s >= MIN_BUSY_S and window.num_tokens > 0:
                self._rates[layout] = self._rate(layout, self._windows.pop(layout))
        return list(self._rates.values())

    def expect(self, replicas: Mapping[str, Replica]) -> None:
        """Set the present replicas, by target, and forget other generators and layouts.

        The last rates are still reported while nothing runs here: a restarted scheduler does not know them.
        """
        self._seen = {target: seen for target, seen in self._seen.items() if target in replicas}
        self._asked_s = {target: asked_s for target, asked_s in self._asked_s.items() if target in replicas}
        layouts = self._num_replicas = Counter(replica.layout for replica in replicas.values())
        if layouts:
            self._rates = {layout: rate for layout, rate in self._rates.items() if layout in layouts}
        self._windows = {layout: window for layout, window in self._windows.items() if layout in layouts}

    def _rate(self, layout: _Layout, window: _Window) -> pb.MeasuredRate:
        rate = pb.MeasuredRate(
            role=pb.ROLE_GENERATOR,
            tokens_per_second=self._num_replicas[layout] * window.num_tokens / window.busy_s / self._time_scale,
            token_s=window.sample_s / window.num_tokens * self._time_scale,
            num_concurrent_samples=window.sample_s / window.busy_s,
            tensor_parallel=layout[0],
            pipeline_parallel=layout[1],
        )
        if self._environment_wait_s is not None:
            rate.environment_wait_s = self._environment_wait_s
        rate.window.FromMilliseconds(round(1000 * window.busy_s * self._time_scale))
        return rate


async def keep_measuring(
    meter: Meter,
    replicas: Callable[[], list[Replica]],
    *,
    security: Security,
    relay_patience: Callable[[], generator_pb2.SetRelayPatienceRequest] | None = None,
) -> None:
    """Poll every generator of the machine into the meter until cancelled; silent ones are skipped.

    Args:
        meter: Takes what they say.
        replicas: Those that are to run.
        security: Credentials of the process.
        relay_patience: How long each leaves new versions to another machine; sent also to those that do not wait.
    """
    channels: dict[str, grpc.aio.Channel] = {}
    try:
        while True:
            there = {replica.target: replica for replica in replicas()}
            meter.expect(there)
            for target in channels.keys() - there.keys():
                await channels.pop(target).close()
            for target in there.keys() - channels.keys():
                channels[target] = open_channel(target, security)
            looks = (_look(meter, replica, channels[target], relay_patience) for target, replica in there.items())
            await asyncio.gather(*looks)
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        for channel in channels.values():
            await channel.close()


async def _look(
    meter: Meter,
    replica: Replica,
    channel: grpc.aio.Channel,
    relay_patience: Callable[[], generator_pb2.SetRelayPatienceRequest] | None,
) -> None:
    stub = generator_pb2_grpc.GeneratorServiceStub(channel)
    request, peer = generator_pb2.GetGeneratorRequest(), f"generator {replica.target}"
    try:
        answer = await call(stub.GetGenerator, request, peer=peer, timeout_s=_TIMEOUT_S)
    except PenstockError:
        # It is starting or ending, which is its supervisor's business.
        return
    meter.see(replica, answer, now_s=asyncio.get_running_loop().time())
    # One of an earlier version of Penstock, or without a site, does not say, and keeps to what it was started with.
    if relay_patience is None or not answer.HasField("relay_patience"):
        return
    wanted = relay_patience()
    if wanted.patience != answer.relay_patience:
        with contextlib.suppress(PenstockError):
            await call(stub.SetRelayPatience, wanted, peer=peer, timeout_s=_TIMEOUT_S)
