"""Starts what a run needs on this machine, keeps it running, and stops it in order.

Invariants:
- Addresses are chosen once: a service that is restarted comes back on the same port.
- Whatever was started is stopped, in the end or when starting failed; `kill` ends everything at once.
- The folder's process records are current, so that `penstock ps` and `stop` need no help from this process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from console.config import RunConfig
from console.derive import (
    Addresses,
    Endpoint,
    broker_config,
    generator_config,
    local_endpoint,
    reward_config,
    scheduler_config,
    trainer_config,
    write_config,
)
from console.embedded_redis import redis_spec, redis_url
from console.folder import ProcessRecord, RunFolder
from console.ports import free_addresses
from console.probes import BROKER, GENERATOR, REWARD, SCHEDULER, TRAINER, service_problem
from console.processes import (
    ServiceFailedError,
    ServiceSpec,
    SupervisedProcess,
    console_argv,
    service_environment,
)
from penstock.config import StrictModel
from penstock.security import Security

REDIS_READY_S = 60.0
SERVICE_READY_S = 120.0
# A generator or trainer imports torch and loads a model; on a busy small machine that takes minutes, not seconds.
MODEL_READY_S = 600.0
_PROBE_S = 2.0
_TRAINER_STOP_S = 60.0
_GENERATOR_STOP_S = 20.0


class Launcher:
    """The processes of one run on this machine."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        security: Security,
        on_change: Callable[[ProcessRecord], None] = lambda record: None,
    ) -> None:
        self.addresses = choose_addresses(config)
        self.records: dict[str, ProcessRecord] = {}
        self._config = config
        self._folder = folder
        self._security = security
        self._on_change = on_change
        self._processes: dict[str, SupervisedProcess] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._given_up = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def names(self) -> list[str]:
        """Names of the processes started so far."""
        return list(self._processes)

    async def start(self) -> None:
        """Start everything, and wait for what StartRun needs: broker, scheduler, trainer. Raises ServiceFailedError.

        Reward worker and generators load meanwhile; they find the run by themselves once it is open.
        """
        addresses, config = self.addresses, self._config
        if addresses.broker.is_local:
            settings = broker_config(addresses, config.broker.redis_url or await self._start_redis())
            self._launch_service("broker", "broker", settings, addresses.broker, BROKER)
        if addresses.scheduler.is_local:
            scheduler = scheduler_config(config, addresses, self._folder)
            self._launch_service("scheduler", "scheduler", scheduler, addresses.scheduler, SCHEDULER)
        if addresses.trainer.is_local:
            self._launch_service("trainer", "trainer", trainer_config(config, addresses), addresses.trainer, TRAINER)
        if addresses.reward.is_local:
            self._launch_service("reward", "reward", reward_config(config, addresses), addresses.reward, REWARD)
        for index, endpoint in enumerate(addresses.generators):
            if endpoint.is_local:
                generator = generator_config(config, addresses, self._folder, index)
                self._launch_service(f"generator-{index}", "generator", generator, endpoint, GENERATOR)
        for name in ("broker", "scheduler", "trainer"):
            await self._wait_ready(name, timeout_s=MODEL_READY_S if name == "trainer" else SERVICE_READY_S)

    async def _start_redis(self) -> str:
        self._launch(redis_spec(self._folder, env=service_environment(os.environ, num_threads=1)))
        await self._wait_ready("redis", timeout_s=REDIS_READY_S)
        return redis_url(self._folder)

    async def watch(self) -> None:
        """Wait until a service is given up, now or later, and raise its ServiceFailedError."""
        await self._given_up.wait()
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Stop everything: consumers of the broker first, then the broker, then its Redis."""
        generators = [name for name in self._processes if name.startswith("generator-")]
        for group in (generators, ["reward"], ["trainer"], ["scheduler"], ["broker"], ["redis"]):
            await asyncio.gather(*(self._processes[name].stop() for name in group if name in self._processes))
        await self._join()

    async def kill(self) -> None:
        """End everything at once."""
        for process in self._processes.values():
            process.kill()
        await self._join()

    def kill_now(self) -> None:
        """`kill` for a signal handler: does not wait."""
        for process in self._processes.values():
            process.kill()

    async def _join(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _wait_ready(self, name: str, *, timeout_s: float) -> None:
        if name not in self._processes:
            return
        process, task = self._processes[name], self._tasks[name]
        waiter = asyncio.create_task(process.ready.wait())
        try:
            await asyncio.wait({waiter, task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
        if task.done():
            task.result()
        if not process.ready.is_set():
            raise ServiceFailedError(f"{name} is not up after {timeout_s:g} s (log: {self._folder.log_of(name)})")

    def _launch_service(self, name: str, kind: str, settings: StrictModel, endpoint: Endpoint, service: str) -> None:
        path = self._folder.services / f"{name}.yaml"
        write_config(settings, path)
        log = self._config.log
        argv = console_argv(
            "serve", kind, "--config", str(path), "--name", name, "--log-level", log.level, "--log-format", log.format
        )

        async def is_ready() -> bool:
            target, security = endpoint.target, self._security
            return await service_problem(target, service, security=security, timeout_s=_PROBE_S) is None

        self._launch(
            ServiceSpec(
                name=name,
                argv=argv,
                address=endpoint.target,
                env=self._environment(kind),
                log_path=self._folder.log_of(name),
                is_ready=is_ready,
                stop_grace_s={"trainer": _TRAINER_STOP_S, "generator": _GENERATOR_STOP_S}.get(kind, 10.0),
            )
        )

    def _environment(self, kind: str) -> dict[str, str]:
        threads = {"generator": self._config.generator.num_threads, "trainer": self._config.trainer.num_threads}
        return service_environment(os.environ, num_threads=threads.get(kind, 1))

    def _launch(self, spec: ServiceSpec) -> None:
        process = SupervisedProcess(spec, on_change=self._note)
        self._processes[spec.name] = process
        task = self._tasks[spec.name] = asyncio.create_task(process.run(), name=spec.name)
        task.add_done_callback(self._take_end)

    def _take_end(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if failure is not None and self._failure is None:
            self._failure = failure
            self._given_up.set()

    def _note(self, record: ProcessRecord) -> None:
        self.records[record.name] = record
        self._folder.write_record(record)
        self._on_change(record)


def choose_addresses(config: RunConfig) -> Addresses:
    """Where every service of the run is or will be: as configured, else on free loopback ports."""
    endpoints, listen = config.endpoints, config.listen
    num_local = config.generator.count if endpoints.generators is None else 0
    free = iter(free_addresses(5 + num_local))

    def endpoint(elsewhere: str | None, here: str | None) -> Endpoint:
        if elsewhere is not None:
            return Endpoint(target=elsewhere, listen=None)
        return local_endpoint(here or next(free))

    generators: tuple[Endpoint, ...]
    if endpoints.generators is None:
        generators = tuple(local_endpoint(next(free)) for _ in range(num_local))
    else:
        generators = tuple(Endpoint(target=target, listen=None) for target in endpoints.generators)
    weights_listen = None if endpoints.trainer is not None else listen.weights or next(free)
    return Addresses(
        broker=endpoint(endpoints.broker, listen.broker),
        scheduler=endpoint(endpoints.scheduler, listen.scheduler),
        reward=endpoint(endpoints.reward, listen.reward),
        trainer=endpoint(endpoints.trainer, listen.trainer),
        generators=generators,
        weights_listen=weights_listen,
        weights_url=_weights_url(weights_listen, listen.public_host),
    )


def _weights_url(weights_listen: str | None, public_host: str | None) -> str | None:
    if weights_listen is None:
        return None
    port = weights_listen.rpartition(":")[2]
    host = public_host or local_endpoint(weights_listen).target.rpartition(":")[0]
    return f"http://{host}:{port}"
