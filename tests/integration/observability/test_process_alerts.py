"""The alerts of processes that are held, starved, restarted or gone: a real Prometheus over real services."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from penstock.network.rpc import open_channel
from penstock.v1 import broker_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.helpers.observability.faulty_clients import called, meanwhile
from tests.helpers.observability.prometheus import PATIENCE_S, Prometheus, needs_prometheus, prometheus
from tests.helpers.observability.served import Served, started

pytestmark = [needs_prometheus, pytest.mark.grid, pytest.mark.slow, pytest.mark.timeout(1200)]
HELD_S = 6.0
"""More than the longest hold that no alert tells of, 5 s."""
RESTARTS_FACTOR = 30
"""Starting a process takes seconds, however compressed the time is: three restarts fit into a minute. On a busy machine
they take longer, and time is compressed less."""
RULE_S = 1800.0
"""The time in which the rule counts restarts."""
NODE = scheduler_pb2.Node(node_id="gpu-1", site="a", accelerators=[scheduler_pb2.Accelerator(kind="L40S", count=1)])


async def test_processes_that_are_held_starved_or_gone_are_alerted(tmp_path: Path) -> None:
    broker = Served("broker", tmp_path, "redis_url=memory://")
    scheduler = Served("scheduler", tmp_path, "heartbeat_interval_s=0.5")
    async with AsyncExitStack() as stack:
        stack.enter_context(started(broker, scheduler))
        seen = await stack.enter_async_context(prometheus(tmp_path / "prometheus"))
        for service in (broker, scheduler):
            await service.until_serving()
            seen.watch(service.service, service.metrics)
        await seen.until_read(broker.metrics, scheduler.metrics)

        async with open_channel(scheduler.address) as channel:
            machines = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            await machines.RegisterNode(scheduler_pb2.RegisterNodeRequest(node=NODE))
            await seen.until_fires("PenstockMachineGone", machine="gpu-1", site="a")
            await machines.ReportNode(scheduler_pb2.ReportNodeRequest(node_id="gpu-1", is_leaving=True))
            await seen.until_resolved("PenstockMachineGone")

        broker.send(signal.SIGSTOP)
        # The fault is that nothing runs for so long.
        await asyncio.sleep(HELD_S)
        broker.send(signal.SIGCONT)
        await seen.until_fires("PenstockBrokerHeld", instance=broker.metrics)
        await seen.until_resolved("PenstockBrokerHeld")
        assert await seen.ever_fired() == {"PenstockMachineGone", "PenstockBrokerHeld"}

        async with open_channel(broker.address) as channel, _overloaded(channel):
            with _short_of_a_core(broker):
                await seen.until_fires("PenstockBrokerBehind", instance=broker.metrics)
        await seen.until_resolved("PenstockBrokerBehind")


async def test_a_process_that_restarts_repeatedly_is_alerted(tmp_path: Path) -> None:
    broker = Served("broker", tmp_path, "redis_url=memory://")
    begun_s = time.monotonic()
    with started(broker):
        await broker.until_serving()
        counted_s = max(RULE_S / RESTARTS_FACTOR, 6 * (time.monotonic() - begun_s))
        factor = max(1, int(RULE_S / counted_s))
        async with prometheus(tmp_path / "prometheus", factor=factor, scrape_every="2s") as seen:
            seen.watch("broker", broker.metrics)
            await asyncio.wait_for(_restart_until_told(broker, seen), 2 * PATIENCE_S)
            await seen.until_fires("PenstockRestarts", instance=broker.metrics, job="penstock-broker")
            await seen.until_resolved("PenstockRestarts", timeout_s=RULE_S / factor + PATIENCE_S)


def _overloaded(channel: grpc.aio.Channel) -> AsyncExitStack:
    """Inside the block more is asked of the broker than one core answers."""

    async def ask() -> None:
        broker = called(channel)
        await broker.open(run_id="busy")
        while True:
            await asyncio.gather(*(broker.call("GetRun", broker_pb2.GetRunRequest(run_id="busy")) for _ in range(64)))

    return meanwhile(ask())


@contextmanager
def _short_of_a_core(service: Served) -> Iterator[None]:
    """Inside the block its process has one core, and others of the same priority on it."""
    core = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(service.pid)
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for pid in (service.pid, *(process.pid for process in spinning)):
            os.sched_setaffinity(pid, core)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
        os.sched_setaffinity(service.pid, before)


async def _restart_until_told(service: Served, seen: Prometheus) -> None:
    """Kill it and start it again, as a supervisor does whose service dies each time."""
    start_time = f'process_start_time_seconds{{instance="{service.metrics}"}}'
    while "PenstockRestarts" not in await seen.names_firing():
        before = await seen.value(start_time)
        service.kill()
        service.start()

        async def is_read(before: float | None = before) -> bool:
            return await seen.value(start_time) not in (None, before)

        await seen.until(is_read, "no scrape of the restarted process", PATIENCE_S)
