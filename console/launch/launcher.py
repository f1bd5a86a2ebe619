"""Starts a run's processes on this machine, keeps them running, and stops them in order.

Invariants:
- Addresses are chosen once: a restarted service returns on the same port.
- Every started process is stopped, at the end or when startup fails; `services.kill` ends everything at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from console.config.config import RunConfig
from console.config.derive import (
    Addresses,
    Endpoint,
    broker_config,
    critic_config,
    generator_config,
    local_endpoint,
    reward_config,
    scheduler_config,
    scorer_config,
    trace_environment,
    trainer_config,
)
from console.config.run_folder import ProcessRecord, RunFolder
from console.devices.run_devices import RunDevices
from console.launch.cpu_pinning import Cores
from console.launch.embedded_redis import redis_spec, redis_url
from console.launch.metrics_targets import TARGETS_VARIABLE, run_targets
from console.launch.ports import free_addresses
from console.launch.probes import service_problem
from console.launch.service_group import ServiceProcesses, log_options
from console.launch.supervisor import ProcessState, ServiceFailedError, ServiceSpec, console_argv, service_environment
from console.node.config import HostConfig, read_machine
from penstock.config import MeasuredConfig
from penstock.process.grace_periods import STOP_GRACE_S
from penstock.rewards.score_messages import THIRD_PARTY
from penstock.rewards.serving import OF_THE_CLUSTER
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.security.plain_text import INSECURE_VARIABLE

REDIS_READY_S = 60.0
SERVICE_READY_S = 120.0
# A generator or trainer imports torch and loads a model; on a small busy machine that takes minutes, not seconds.
MODEL_READY_S = 600.0


class Launcher:
    """Starts and stops the processes of one run on this machine, `services`."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        security: Security,
        devices: RunDevices | None = None,
        on_change: Callable[[ProcessRecord], None] = lambda record: None,
        on_wait: Callable[[str, str, float], None] = lambda name, problem, waited_s: None,
    ) -> None:
        self.addresses = choose_addresses(config)
        self._config = config
        self._folder = folder
        self.services = ServiceProcesses(
            folder,
            security=security,
            log=config.log,
            on_change=self._take_change,
            on_wait=on_wait,
            targets=run_targets(folder),
        )
        self._on_change = on_change
        self._cores: Cores | None = None
        self._devices = devices
        self._tracing = trace_environment(config, folder)

    async def start(self) -> None:
        """Start everything, and wait for what StartRun needs: broker, scheduler, trainer. Raises ServiceFailedError.

        Reward worker, scorers, critic and generators load meanwhile: they find the run once it is open, or it them.
        """
        addresses, config = self.addresses, self._config
        self._claim_gpus()
        num_generators = sum(endpoint.is_local for endpoint in addresses.generators)
        self._cores = Cores.of_run(config, num_generators=num_generators)
        if addresses.broker.is_local:
            settings = broker_config(config, addresses, config.broker.redis_url or await self._start_redis())
            self._launch("broker", settings, addresses.broker)
        if addresses.scheduler.is_local:
            self._launch("scheduler", scheduler_config(config, addresses, self._folder), addresses.scheduler)
        if addresses.environment is not None and addresses.environment.is_local:
            self._launch_environment(addresses.environment)
        if addresses.trainer.is_local:
            self._launch("trainer", trainer_config(config, addresses), addresses.trainer)
        if addresses.critic is not None and addresses.critic.is_local:
            self._launch("critic", critic_config(config, addresses, self._folder), addresses.critic)
        if addresses.reward.is_local:
            self._launch("reward", reward_config(config, addresses), addresses.reward)
        self._launch_workers()
        for path in config.scheduler.nodes:
            self._launch_node(path)
        for name in ("broker", "scheduler", "trainer"):
            if name in self.services.names:
                await self.services.wait_ready(name, timeout_s=MODEL_READY_S if name == "trainer" else SERVICE_READY_S)

    def _launch_workers(self) -> None:
        config, addresses = self._config, self.addresses
        for index, endpoint in enumerate(addresses.scorers):
            self._launch(f"scorer-{index}", scorer_config(config, addresses, index), endpoint)
        for index, endpoint in enumerate(addresses.generators):
            if endpoint.is_local:
                generator = generator_config(config, addresses, self._folder, index)
                self._launch(f"generator-{index}", generator, endpoint)

    def _claim_gpus(self) -> None:
        if self._devices is not None and (problem := self._devices.claim()):
            raise ServiceFailedError(problem)

    async def _start_redis(self) -> str:
        self.services.launch(redis_spec(self._folder, env=service_environment(os.environ, num_threads=1)))
        await self.services.wait_ready("redis", timeout_s=REDIS_READY_S)
        return redis_url(self._folder)

    async def stop(self) -> None:
        """Stop everything: consumers of the broker first, then the broker, then its Redis.

        The scheduler goes before them: it would look for a plan without the machines that leave.
        """
        generators = [name for name in self.services.names if name.startswith(("generator-", "node-"))]
        scorers = [name for name in self.services.names if name.startswith("scorer-")]
        for group in (
            ["scheduler"],
            generators,
            ["reward", "environment", *scorers],
            ["trainer"],
            ["critic"],
            ["broker"],
            ["redis"],
            [name for name in self.services.names if name.startswith("host-")],
        ):
            await self.services.stop(group)
        if self._cores is not None:
            self._cores.release()
        if self._devices is not None:
            self._devices.claims.release()

    def _take_change(self, record: ProcessRecord) -> None:
        # Not earlier: while they load, all processes need every core.
        if record.state == ProcessState.READY and self._cores is not None:
            self._cores.bind(record.name, record.pid)
        self._on_change(record)

    def _launch_environment(self, endpoint: Endpoint) -> None:
        section = self._config.environment
        assert section is not None
        metrics = self.services.metrics_address("environment")
        judges = Security.from_environment(JUDGES, insecure=self._config.insecure)

        async def is_ready() -> bool:
            return await service_problem(endpoint.target, "environment", security=judges) is None

        # As a server elsewhere it is never shown the cluster's own credentials.
        inherited = {name: value for name, value in os.environ.items() if name not in OF_THE_CLUSTER} | self._tracing
        plain = {INSECURE_VARIABLE: "true"} if self._config.insecure else {}
        self.services.launch(
            ServiceSpec(
                name="environment",
                kind="environment",
                argv=console_argv(
                    *("env", "serve", section.target, "--listen", endpoint.listen or "", "--metrics-listen", metrics),
                    *log_options(self._config.log),
                ),
                address=endpoint.target,
                metrics=metrics,
                env=service_environment(inherited | plain, num_threads=1),
                log_path=self._folder.log_of("environment"),
                is_ready=is_ready,
                stop_grace_s=STOP_GRACE_S["environment"],
            ),
            serves_tls=judges.serves_tls,
        )

    def _launch_node(self, path: Path) -> None:
        # A machine that has the run's broker ends last.
        role = "host" if isinstance(read_machine(path), HostConfig) else "node"
        name = f"{role}-{path.stem.removeprefix('node-')}"
        own = {**self._tracing, **self._gpus_of(name), TARGETS_VARIABLE: str(run_targets(self._folder, name))}
        self.services.launch(
            ServiceSpec(
                name=name,
                kind="node",
                argv=console_argv("node", str(path)),
                address="",
                env=service_environment({**os.environ, **own}, num_threads=1),
                log_path=self._folder.log_of(name),
                # A node serves nothing; its generators show whether it works.
                is_ready=lambda: asyncio.sleep(0, result=True),
                stop_grace_s=STOP_GRACE_S["node"],
            )
        )

    def _launch(self, name: str, settings: MeasuredConfig, endpoint: Endpoint) -> None:
        kind = name.partition("-")[0]
        threads = {
            "critic": self._config.trainer.num_threads,
            "generator": self._config.generator.num_threads,
            "scorer": self._config.trainer.num_threads,
            "trainer": self._config.trainer.num_threads,
        }
        num_threads = threads.get(kind, 1)
        self.services.launch_service(
            kind,
            settings,
            name=name,
            target=endpoint.target,
            num_threads=num_threads,
            environment={**self._tracing, **self._gpus_of(name)},
        )

    def _gpus_of(self, name: str) -> dict[str, str]:
        return {} if self._devices is None else self._devices.environment(name)


def choose_addresses(config: RunConfig) -> Addresses:
    """Addresses of every service of the run: as configured, else free loopback ports."""
    endpoints, listen = config.endpoints, config.listen
    num_local = config.generator.count if config.starts_generators else 0
    free = iter(free_addresses(6 + num_local + config.num_scorers))

    def endpoint(elsewhere: str | None, here: str | None) -> Endpoint:
        if elsewhere is not None:
            return Endpoint(target=elsewhere, listen=None)
        return local_endpoint(here or next(free))

    generators: Sequence[str | None] = [None] * num_local if endpoints.generators is None else endpoints.generators
    weights_listen = None if endpoints.trainer is not None else listen.weights or next(free)
    return Addresses(
        broker=endpoint(endpoints.broker, listen.broker),
        scheduler=endpoint(endpoints.scheduler, listen.scheduler),
        reward=endpoint(endpoints.reward, listen.reward) if config.rewards else Endpoint(target="", listen=None),
        trainer=endpoint(endpoints.trainer, listen.trainer),
        generators=tuple(endpoint(target, None) for target in generators),
        scorers=tuple(endpoint(None, None) for _ in range(config.num_scorers)),
        critic=endpoint(endpoints.critic, None) if config.algorithm.has_critic_service else None,
        environment=_environment_endpoint(config, free),
        weights_listen=weights_listen,
        weights_url=_weights_address(weights_listen, listen.public_host),
    )


def _environment_endpoint(config: RunConfig, free: Iterator[str]) -> Endpoint | None:
    section, listen = config.environment, config.listen.environment
    if section is None:
        return None
    if not section.is_local:
        return Endpoint(target=section.target.removeprefix(THIRD_PARTY), listen=None)
    if listen is not None and config.listen.public_host is not None:
        # The same name for all clients: machines of a plan, a trainer elsewhere, this run.
        return Endpoint(target=f"{config.listen.public_host}:{listen.rpartition(':')[2]}", listen=listen)
    return local_endpoint(listen or next(free))


def _weights_address(weights_listen: str | None, public_host: str | None) -> str | None:
    if weights_listen is None:
        return None
    port = weights_listen.rpartition(":")[2]
    host = public_host or local_endpoint(weights_listen).target.rpartition(":")[0]
    return f"{host}:{port}"
