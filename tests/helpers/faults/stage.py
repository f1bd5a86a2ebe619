"""The processes and links of the fault test, and what breaks them.

generators, workers, trainer --(link to broker 0, link to broker 1)--> brokers --(link each)--> Redis
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.network import rpc
from tests.helpers.console import COMMAND, ROOT, environment
from tests.helpers.faults.schedule import Fault
from tests.helpers.ports import free_address
from tests.helpers.proxies.tcp_proxy import TcpProxy
from tests.helpers.stores.redis_server import RedisProcess

NUM_BROKERS = 2
SLOW_BYTES_PER_SECOND = 200_000.0
SLOW_DELAY_S = 0.05


class Process:
    """A process that is killed and started again."""

    def __init__(self, name: str, argv: list[str], folder: Path, *, seed: int | None = None) -> None:
        self.name = name
        self.argv, self._folder, self._seed = argv, folder, seed
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def start(self) -> None:
        """Start it, with another seed each time if it takes one."""
        argv = self.argv if self._seed is None else [*self.argv, str(self._seed + self.num_starts)]
        self.num_starts += 1
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=log, stderr=log)

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs or was never started."""
        return None if self._process is None else self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def become(self, argv: list[str]) -> None:
        """Drain it as a supervisor would, and start this instead; raises AssertionError where its status is not 0."""
        assert self._process is not None
        self._process.terminate()
        assert await asyncio.to_thread(self._process.wait, 30) == 0
        self.argv = argv
        self.start()

    def kill(self) -> None:
        """Kill it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None


class RedisRole(Process):
    """The Redis of the stage."""

    def __init__(self, folder: Path, *, fsync: str) -> None:
        super().__init__("redis", [], folder)
        self.server = RedisProcess(folder, is_persistent=True, fsync=fsync)

    def start(self) -> None:
        """Start it, without waiting for its data."""
        self.num_starts += 1
        self.server.launch()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        with suppress(AssertionError):
            self.server.pause() if number == signal.SIGSTOP else self.server.resume()

    def kill(self) -> None:
        """Kill it."""
        self.server.kill()


class Stage:
    """See the module. An async context manager: everything runs inside, nothing is left behind."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        fsync: str = "always",
        broker_settings: Sequence[str] = (),
        num_generators: int = 3,
        num_workers: int = 2,
    ) -> None:
        """`broker_settings` may name a Redis that the test looks after; the stage then has none of its own."""
        self._folder = folder
        self._broker_settings = list(broker_settings)
        self._redis = None if broker_settings else RedisRole(folder, fsync=fsync)
        self.processes: dict[str, Process] = {}
        self.links: dict[str, TcpProxy] = {}
        self.direct_brokers: list[str] = []
        """Addresses of the brokers that no link is in the way of."""
        self._clients: list[tuple[str, str, int]] = [
            *((f"generator-{index}", "generator", seed + 1_000 * index) for index in range(num_generators)),
            *((f"worker-{index}", "reward", seed + 10_000 * (index + 1)) for index in range(num_workers)),
            ("producer", "producer", seed + 100_000),
            ("trainer", "trainer", seed),
        ]
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __aenter__(self) -> Stage:
        """Start everything."""
        if self._redis is not None:
            self._redis.server.start()
            self._redis.num_starts += 1
            self.processes["redis"] = self._redis
        for index in range(NUM_BROKERS):
            await self._add_broker(index)
        brokers = ",".join(self.links[f"broker-{index}-link"].address for index in range(NUM_BROKERS))
        for name, module, seed in self._clients:
            argv = [sys.executable, "-m", f"tests.helpers.faults.{module}", brokers, name, str(self._folder)]
            self._add(Process(name, argv, self._folder, seed=seed))
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Kill everything."""
        for process in self.processes.values():
            process.kill()
        for link in self.links.values():
            await link.stop()

    async def play(self, faults: list[Fault]) -> None:
        """Let happen what is scheduled, and end with everything mended."""
        began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(max(0.0, began_s + fault.at_s - asyncio.get_running_loop().time()))
                tasks.create_task(self._happen(fault))

    async def upgrade_broker(self, index: int) -> None:
        """Put the next version in the place of a broker, and wait until it serves."""
        broker, address = self.processes[f"broker-{index}"], self.direct_brokers[index]
        await broker.become(
            [sys.executable, "-P", "-m", "tests.helpers.faults.newer_broker", *broker.argv[len(COMMAND) :]]
        )
        assert await rpc.wait_until_serving(address, timeout_s=60)

    def check_running(self) -> None:
        """No process may end by itself."""
        for process in self.processes.values():
            assert process.status is None, f"{process.name} ended by itself with status {process.status}"

    async def _add_broker(self, index: int) -> None:
        settings = self._broker_settings
        if self._redis is not None:
            to_redis = self.links[f"redis-{index}-link"] = TcpProxy(self._redis.server.port)
            await to_redis.start()
            settings = [f"redis_url=redis://{to_redis.address}/0"]
        listen = free_address()
        self.direct_brokers.append(listen)
        argv = [*COMMAND, "serve", "broker", *settings, "--listen", listen]
        self._add(Process(f"broker-{index}", argv, self._folder))
        to_broker = self.links[f"broker-{index}-link"] = TcpProxy(int(listen.rpartition(":")[2]))
        await to_broker.start()

    def _add(self, process: Process) -> None:
        self.processes[process.name] = process
        process.start()

    async def _happen(self, fault: Fault) -> None:
        # What is broken already is mended first.
        async with self._turns[fault.target]:
            if fault.target in self.processes:
                await self._break_process(self.processes[fault.target], fault)
            else:
                await self._break_link(self.links[fault.target], fault)

    async def _break_process(self, process: Process, fault: Fault) -> None:
        assert process.status is None, f"{process.name} ended by itself with status {process.status}"
        if fault.kind == "kill":
            process.kill()
            await asyncio.sleep(fault.lasts_s)
            process.start()
            return
        process.send(signal.SIGSTOP)
        await asyncio.sleep(fault.lasts_s)
        process.send(signal.SIGCONT)

    async def _break_link(self, link: TcpProxy, fault: Fault) -> None:
        match fault.kind:
            case "slow":
                link.delay_s, link.bytes_per_second = SLOW_DELAY_S, SLOW_BYTES_PER_SECOND
            case "refuse":
                link.is_refusing = True
                link.cut()
            case _:
                link.cut()
        await asyncio.sleep(fault.lasts_s)
        link.heal()
