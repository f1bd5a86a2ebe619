"""Reports this machine and its measured rates to the scheduler; a scheduler that is away never matters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from penstock.errors import BadTokenError, NotOfferedError, PenstockError
from penstock.network.outage import Outage
from penstock.network.rpc import call, open_channel
from penstock.process.logger import get_logger
from penstock.security import Security
from penstock.v1 import scheduler_pb2 as pb
from penstock.v1 import scheduler_pb2_grpc

_log = get_logger()
_RETRY_S = 5.0
_TIMEOUT_S = 5.0
_LOOK_S = 1.0


def this_machine(*, node_id: str, site: str = "", roles: Sequence[pb.Role.ValueType] = ()) -> pb.Node:
    """This machine as far as the standard library knows it: its cores and its memory, as one CPU.

    A process that knows its GPUs adds them to `accelerators` itself.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_cpu_cores = len(os.sched_getaffinity(0))
    node = pb.Node(node_id=node_id, site=site, num_cpu_cores=num_cpu_cores, memory_bytes=memory_bytes, roles=roles)
    node.accelerators.add(kind="cpu", count=1, memory_bytes=memory_bytes)
    return node


async def report_node(
    scheduler: str,
    node: pb.Node | Callable[[], pb.Node],
    *,
    measure: Callable[[], list[pb.MeasuredRate]],
    start_s: Callable[[], float | None] = lambda: None,
    move_s: Callable[[], float | None] = lambda: None,
    security: Security,
) -> None:
    """Register `node` and report until cancelled; waits while the scheduler is away.

    Registers again if the scheduler forgot the machine, or its description changed.

    Args:
        scheduler: Address of the scheduler.
        node: This machine; where its description may change, what returns it.
        measure: Returns its newest rates.
        start_s: Returns how long its newest generator took to start, if one did.
        move_s: Returns how long a trainer last took to move here, if one did.
        security: Credentials of the process.

    Raises:
        BadTokenError, NotOfferedError: the scheduler refuses this process for good.
    """
    async with open_channel(scheduler, security) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        known: pb.Node | None = None
        interval_s = _RETRY_S
        outage = Outage(f"scheduler {scheduler}")
        while True:
            try:
                present = node() if callable(node) else node
                if known != present:
                    request = pb.RegisterNodeRequest(node=present)
                    answer = await call(stub.RegisterNode, request, peer=f"scheduler {scheduler}", timeout_s=_TIMEOUT_S)
                    interval_s = max(0.5, answer.heartbeat_interval.ToMilliseconds() / 1000)
                    known = present
                report = pb.ReportNodeRequest(
                    node_id=present.node_id, rates=measure(), generator_start_s=start_s(), trainer_move_s=move_s()
                )
                await call(stub.ReportNode, report, peer=f"scheduler {scheduler}", timeout_s=_TIMEOUT_S)
                outage.answered()
            except (BadTokenError, NotOfferedError):
                raise
            except PenstockError as error:
                known = None
                outage.failed(error)
            await asyncio.sleep(interval_s)


async def say_leaving(scheduler: str, node_id: str, *, security: Security) -> None:
    """Report that a machine leaves, so that the scheduler does not expect its reports; no error if that is away."""
    async with open_channel(scheduler, security) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = pb.ReportNodeRequest(node_id=node_id, is_leaving=True)
        try:
            await call(stub.ReportNode, request, peer=f"scheduler {scheduler}", timeout_s=_TIMEOUT_S)
        except PenstockError as error:
            _log.debug("scheduler away", scheduler=scheduler, error=str(error))


async def find_address(scheduler: str, node_id: str, *, security: Security) -> str:
    """The address of another machine; waits until it has registered, and while the scheduler is away."""
    async with open_channel(scheduler, security) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        outage = Outage(f"scheduler {scheduler}")
        while True:
            try:
                answer = await call(
                    stub.ListNodes, pb.ListNodesRequest(), peer=f"scheduler {scheduler}", timeout_s=_TIMEOUT_S
                )
                outage.answered()
                found = (view.node.address for view in answer.nodes if view.node.node_id == node_id)
                if address := next(found, ""):
                    return address
            except PenstockError as error:
                outage.failed(error)
            await asyncio.sleep(_LOOK_S)
