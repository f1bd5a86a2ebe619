"""Runs `penstock node` on a machine without GPUs: broker with its Redis, scheduler, reward worker, as a plan has them.

Invariants:
- Brokers start once their Redis answers, and end before it.
- Everything ends with this process, however it ends; what was stored is there when it starts again.
- After SIGTERM, brokers keep serving until no client is connected, for `client_wait_s` at most.
"""

from __future__ import annotations

import asyncio
import math
import os

import structlog

from console.config.derive import local_endpoint
from console.config.run_folder import RunFolder
from console.launch.embedded_redis import redis_spec, redis_url
from console.launch.launcher import REDIS_READY_S
from console.launch.ports import free_block
from console.launch.service_group import ServiceProcesses
from console.launch.supervisor import service_environment
from console.node.callers import num_callers
from console.node.config import HostConfig
from console.node.scoring import REWARD, ScoringPlace, own_settings
from penstock.config import MeasuredConfig
from penstock.process.tasks import race
from penstock.security import Security
from penstock.security.checks.inspection import LOOPBACK
from penstock.security.checks.watching import CertificateWatch

SAY_EVERY_S = 30.0
_LOOK_S = 0.5
_log = structlog.get_logger()


class HostAgent:
    """One machine."""

    def __init__(self, config: HostConfig, *, security: Security) -> None:
        self._config = config
        self._security = security
        self._folder = RunFolder(config.dir.expanduser().absolute())
        self._folder.create()
        self._services = ServiceProcesses(
            self._folder, security=security, log=config.log, pauses=False, machine=config.node_id
        )

    async def run(self) -> None:
        """Keep its services running until cancelled. Raises ServiceFailedError, FolderRefusedError, ConfigError."""
        await self._start()
        watch = CertificateWatch(self._security.tls_files, hosts=[LOOPBACK])
        await race(self._services.watch(), watch.run())

    async def leave(self) -> None:
        """End its services, brokers before their Redis, once others have left them."""
        await self._await_callers()
        await self._services.stop([name for name in self._services.names if name != "redis"])
        await self._services.stop(["redis"])

    async def _await_callers(self) -> None:
        names = {name for name in self._services.names if name.startswith("broker")}
        ports = {int(local_endpoint(broker.listen).target.rpartition(":")[2]) for broker in self._config.brokers}
        if not names:
            return
        loop = asyncio.get_running_loop()
        until_s, said_s = loop.time() + self._config.client_wait_s, -math.inf
        while loop.time() < until_s:
            pids = [record.pid for name, record in self._services.records.items() if name in names]
            num = await asyncio.to_thread(num_callers, ports, pids)
            if not num:
                return
            if loop.time() - said_s >= SAY_EVERY_S:
                said_s = loop.time()
                _log.info("the broker serves on", connections=num, at_most_s=round(until_s - loop.time()))
            await asyncio.sleep(_LOOK_S)

    async def _start(self) -> None:
        config = self._config
        if (scheduler := config.scheduler) is not None:
            self._launch("scheduler", scheduler, scheduler.listen)
        if any("redis_url" not in each.model_fields_set for each in config.brokers):
            self._services.launch(redis_spec(self._folder, env=service_environment(os.environ, num_threads=1)))
            await self._services.wait_ready("redis", timeout_s=REDIS_READY_S)
        for index, broker in enumerate(config.brokers):
            own = {} if "redis_url" in broker.model_fields_set else {"redis_url": redis_url(self._folder)}
            self._launch(f"broker-{index}" if index else "broker", broker.model_copy(update=own), broker.listen)
        if config.reward is not None:
            place = ScoringPlace(kind=REWARD)
            named = own_settings(config.reward.listen, place, node_id=config.node_id, free_port=free_block(1))
            worker = config.reward.model_copy(update=named)
            self._launch(REWARD, worker, worker.listen)

    def _launch(self, name: str, settings: MeasuredConfig, listen: str) -> None:
        own = settings.model_copy(update={"insecure": settings.insecure or self._config.insecure})
        target = local_endpoint(listen).target
        self._services.launch_service(name.partition("-")[0], own, name=name, target=target)
