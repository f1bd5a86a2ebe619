"""Runs a peer system beside the broker: its processes, and a repetition of the workload through them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count as counting
from pathlib import Path

from benchmarks.broker.processes import CpuMeter, Stage, Worker, cpu_s, free_port
from benchmarks.broker.workload import WORKLOADS
from benchmarks.broker.workloads.throughput import play, rates
from benchmarks.environments import Environment

MAX_QUEUED = 1_024
"""Most waiting trajectories, if there is such a limit: those of a step."""
IDLE_CORES = 0.15
"""CPU that a started server may still use; Ray's processes are never idle."""
START_TIMEOUT_S = 300.0
REVERB_VERSION = "0.14.0"
TRANSFER_QUEUE_VERSION = "0.1.11"
TORCH_VERSION = "2.13.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Description of a peer."""

    module: str
    """Module of its roles."""
    environment: Environment | None
    """Its environment; None uses Penstock's own Python."""


KINDS = {
    "raw_redis": Kind(module="peers.raw_redis_side", environment=None),
    "pipelinerl_pattern": Kind(module="peers.pipelinerl_side", environment=None),
    "reverb": Kind(
        module="peers.reverb_side",
        environment=Environment(
            name=f"reverb-{REVERB_VERSION}",
            installs=((f"dm-reverb[tensorflow]=={REVERB_VERSION}", "numpy<2"),),
            check="import reverb",
        ),
    ),
    "transfer_queue": Kind(
        module="peers.transfer_queue_side",
        environment=Environment(
            name=f"transfer-queue-{TRANSFER_QUEUE_VERSION}",
            # torch first and alone: later packages are then resolved against this build.
            installs=(
                (f"torch=={TORCH_VERSION}",),
                (f"TransferQueue=={TRANSFER_QUEUE_VERSION}", f"torch=={TORCH_VERSION}"),
            ),
            check="import transfer_queue",
        ),
    ),
}


@dataclass(slots=True, kw_only=True)
class Peer:
    """Its server and its clients, each in its own process and environment."""

    module: str
    folder: Path
    address: str
    server: Worker
    workers: list[Worker]
    """Producers, and the consumer last."""
    _runs: counting[int] = field(default_factory=counting)

    @classmethod
    async def start(cls, stage: Stage, kind: Kind, python: Path | None, *, num_workers: int) -> Peer:
        """Start everything, in `python`, or in Penstock's own without Penstock's tuning."""
        # Not its own folder: Ray creates sockets under it, whose paths may have at most 107 bytes.
        folder = stage.folder
        # Ray listens on the machine's address: require a token.
        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        server = await stage.start_worker(python=python, is_plain=True, env=env)
        address = f"127.0.0.1:{free_port()}"
        await server.prepare(f"{kind.module}:serve", address=address, folder=str(folder), max_queued=MAX_QUEUED)
        workers = [await stage.start_worker(python=python, is_plain=True, env=env) for _ in range(num_workers)]
        await _until_idle(server)
        return cls(module=kind.module, folder=folder, address=address, server=server, workers=workers)

    async def measure(self, workload: str, count: int) -> dict[str, float]:
        """One repetition, as `throughput.measure`."""
        *producers, consumer = self.workers
        made = WORKLOADS[workload]
        share = count // len(producers)
        count = share * len(producers)
        common = {"address": self.address, "folder": str(self.folder), "num_tokens": made.num_tokens}
        common["run_id"] = f"{workload}-{next(self._runs)}"
        for name, producer in enumerate(producers):
            role = f"{self.module}:produce"
            await producer.prepare(role, **common, name=name, num_per_put=made.num_per_put, count=share)
        await consumer.prepare(f"{self.module}:consume", **common, count=count)
        clients = {f"producer_{number}": producer for number, producer in enumerate(producers)}
        meter = CpuMeter(server=self.server, **clients, consumer=consumer)
        *sent, received = await play(self.workers)
        used_s = meter.used_s()
        if (received["num_received"], received["num_bad"]) != (count, 0):
            raise RuntimeError(f"{self.module}: not once and intact: {received} of {count}")
        return rates(made, count=count, sent=sent, received=received, cpu_s=used_s)

    async def stop(self) -> None:
        """Stop the server cleanly, then the clients."""
        await self.server.go()
        for worker in (*self.workers, self.server):
            await worker.stop()


async def _until_idle(server: Worker) -> None:
    """Wait for background start-up: Ray still creates processes when it reports that it is ready."""
    async with asyncio.timeout(START_TIMEOUT_S):
        used_s = cpu_s(server.pid)
        while True:
            await asyncio.sleep(1.0)
            before_s, used_s = used_s, cpu_s(server.pid)
            if used_s - before_s < IDLE_CORES:
                return


async def pythons(*, cache_dir: Path, progress: Callable[[str], None]) -> dict[str, Path | None]:
    """A Python for each kind that needs its own, created if missing. Raises RuntimeError."""
    return {
        name: await kind.environment.python(cache_dir=cache_dir, progress=progress) if kind.environment else None
        for name, kind in KINDS.items()
    }
