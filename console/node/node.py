"""Runs `penstock node`: offers a machine to a scheduler and runs what the run's plan assigns to it.

    registers, reports its speed --> the plan names it: its generators start --> a revision: they stop, others start
                                     and the trainer, where it has one             (the trainer after a checkpoint)
                                                      |
       SIGTERM, a notice, or a generator is given up: it reports that it leaves, and generators give back their leases

Invariants:
- While the scheduler is away, or has forgotten the plan, running generators continue.
- A GPU is given to another process only after the previous one has ended.
- Generators and trainer end with this process, however it ends.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from itertools import chain
from pathlib import Path

import structlog

from console.config.derive import local_endpoint
from console.config.run_folder import RunFolder
from console.launch.disk_watch import FolderRefusedError
from console.launch.ports import free_block
from console.launch.service_group import ServiceProcesses
from console.launch.supervisor import ServiceFailedError, watch_launcher
from console.node.assignment import (
    Placement,
    change,
    generator_config,
    misfits,
    placements,
    relay_of,
    relay_patience,
)
from console.node.config import HostConfig, NodeConfig, read_machine
from console.node.gpus import own_gpus, visible
from console.node.host import HostAgent
from console.node.rates import Meter, Replica, keep_measuring
from console.node.scoring import scoring_misfits
from console.node.scoring_processes import ScoringProcesses
from console.node.service_rates import ServiceMeter
from console.node.trainer_processes import TrainerProcesses, is_training
from console.node.training import missing_run, obstacle, training_place
from penstock.clients.scheduler.inventory import find_address, report_node, say_leaving, this_machine
from penstock.clients.scheduler.plans import watch_plan
from penstock.config import ConfigError
from penstock.errors import BadTokenError, NotOfferedError
from penstock.notices.watch import NoticeSources, heed
from penstock.process.grace_periods import LEAVE_S
from penstock.process.log_setup import configure_logging
from penstock.process.signals import StopSignals
from penstock.process.tasks import race
from penstock.security import Security
from penstock.security.checks.inspection import LOOPBACK
from penstock.security.checks.watching import CertificateWatch
from penstock.v1 import scheduler_pb2 as pb

EXIT_OK, EXIT_FAILED = 0, 1
SAY_EVERY_S = 60.0
_log = structlog.get_logger()


def node_command(path: Path, overrides: list[str], *, notices: NoticeSources) -> int:
    """Run `penstock node` until SIGTERM, Ctrl-C or a notice; returns the exit status. Raises ConfigError."""
    config = read_machine(path, overrides)
    configure_logging(config.node_id, level=config.log.level, log_format=config.log.format)
    watch_launcher()
    return asyncio.run(_run(config, Security.from_environment(insecure=config.insecure), notices))


async def _run(config: NodeConfig | HostConfig, security: Security, notices: NoticeSources) -> int:
    with StopSignals() as signals:
        heed(notices)
        node: NodeAgent | HostAgent
        if isinstance(config, NodeConfig):
            node = NodeAgent(config, security=security)
        else:
            node = HostAgent(config, security=security)
        try:
            await race(node.run(), signals.requested.wait())
        except (ServiceFailedError, FolderRefusedError) as error:
            _log.error("this machine leaves", reason=str(error))
            return EXIT_FAILED
        except (BadTokenError, NotOfferedError) as error:
            raise ConfigError(str(error)) from error
        finally:
            await node.leave()
    return EXIT_OK


class NodeAgent:
    """One machine."""

    def __init__(self, config: NodeConfig, *, security: Security) -> None:
        self._config = config
        self._security = security
        folder = RunFolder(config.dir.expanduser().absolute())
        folder.create()
        self._services = ServiceProcesses(
            folder, security=security, log=config.log, pauses=False, machine=config.node_id
        )
        self._gpus = own_gpus(config)
        # A plan over emulated GPUs uses their time.
        time_scale = config.generator.emulated.time_scale if config.generator.engine.is_emulated else 1.0
        self._running: dict[str, Placement] = {}
        self._scoring = ScoringProcesses(config, services=self._services, gpus=self._gpus, security=security)
        self._trainer = TrainerProcesses(
            config,
            services=self._services,
            gpus=self._gpus,
            find_address=partial(find_address, config.scheduler, security=security),
            is_training=partial(is_training, security=security),
            time_scale=time_scale,
        )
        self._relay: str | None = None
        """The machine that brings weights to this site by the newest plan."""
        self._reported = ""
        """Why this machine is not planned to train, as logged last."""
        self._say_at_s = 0.0
        """When to log again, in the loop's time, that there is no plan."""
        self._replicas: dict[str, list[Replica]] = {}
        """Generators of each running process."""
        self._meter = Meter(time_scale=time_scale)
        self._service_meter = ServiceMeter(
            config.generator.run_id, self._scoring.measured_targets, security=security, time_scale=time_scale
        )

    async def run(self) -> None:
        """Follow the plan until cancelled.

        Raises:
            ServiceFailedError: a generator cannot be kept running.
            BadTokenError, NotOfferedError: the scheduler refuses this machine for good.
        """
        config, security = self._config, self._security
        await race(
            report_node(
                config.scheduler,
                self._description,
                measure=lambda: [*self._meter.rates(), *self._service_meter.rates()],
                start_s=lambda: self._meter.start_s,
                move_s=lambda: self._trainer.move_s,
                security=security,
            ),
            keep_measuring(
                self._meter,
                self._all_replicas,
                security=security,
                relay_patience=lambda: relay_patience(config, self._relay),
            ),
            self._service_meter.keep_asking(),
            self._follow(),
            self._services.watch(),
            CertificateWatch(security.tls_files, hosts=[LOOPBACK]).run(),
        )

    def _description(self) -> pb.Node:
        problem = missing_run(self._config)
        if problem and problem != self._reported:
            _log.warning("this machine is not planned to train", reason=problem)
        self._reported = problem
        return machine(self._config, trains=self._config.trainer is not None and not problem)

    async def leave(self) -> None:
        """Report that this machine leaves, so that the plan continues without it at once, and end its processes."""
        await asyncio.gather(
            say_leaving(self._config.scheduler, self._config.node_id, security=self._security),
            self._services.stop(self._running, within_s=LEAVE_S),
            self._scoring.stop(within_s=LEAVE_S),
            # No deadline for its checkpoint: the operator, or the cloud, that takes the machine away sets one.
            self._trainer.stop(),
        )

    async def _follow(self) -> None:
        plans = watch_plan(self._config.scheduler, self._config.generator.run_id, security=self._security)
        async with aclosing(plans):
            async for plan in plans:
                if plan is not None:
                    await self._carry_out(plan)
                else:
                    self._say_there_is_no_plan()

    def _all_replicas(self) -> list[Replica]:
        return list(chain.from_iterable(self._replicas.values()))

    def _say_there_is_no_plan(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._say_at_s:
            self._say_at_s = now_s + SAY_EVERY_S
            _log.info(
                "waiting for a plan: the scheduler has none for this run",
                scheduler=self._config.scheduler,
                run_id=self._config.generator.run_id,
            )

    async def _carry_out(self, plan: pb.Plan) -> None:
        wanted = placements(plan, self._config)
        unfit = (*misfits(plan, self._config), *scoring_misfits(plan, self._config), obstacle(plan, self._config))
        for misfit in filter(None, unfit):
            _log.warning("the plan does not fit this machine", revision=plan.revision, wanted=misfit)
        self._relay = relay_of(plan, self._config)
        todo = change(self._running, wanted)
        if todo.stops or todo.starts:
            started = [f"{one.name} (GPUs {', '.join(map(str, one.gpus))})" for one in todo.starts]
            _log.info("the plan is carried out", revision=plan.revision, stops=todo.stops, starts=started)
        asked_s = asyncio.get_running_loop().time()
        place = training_place(plan, self._config)
        stays = self._trainer.is_at(place)
        taken = {gpu for one in wanted.values() for gpu in one.gpus} | ({*place.gpus} if place is not None else set())
        await asyncio.gather(
            self._services.stop(todo.stops),
            self._scoring.make_room(plan, taken=taken),
            *([] if stays else [self._trainer.stop()]),
        )
        for name in todo.stops:
            del self._running[name], self._replicas[name]
        if place is not None and not stays:
            # The first plan starts the run, and moves nothing.
            self._trainer.start(place, asked_s=asked_s if plan.revision > 1 else None)
        self._scoring.start()
        for one in todo.starts:
            self._start(one)
            for replica in self._replicas[one.name]:
                self._meter.begin(replica, asked_s)

    def _start(self, placement: Placement) -> None:
        config = self._config
        first = int(config.generator.listen.rpartition(":")[2])
        port = first + 2 * placement.gpus[0] if first else free_block(max(2, placement.num_replicas))
        settings = generator_config(config, placement, port=port, relay=self._relay)
        target = local_endpoint(settings.listen).target
        self._services.launch_service(
            "generator",
            settings,
            name=placement.name,
            target=target,
            num_threads=settings.engine.num_threads,
            environment=visible(placement.gpus, self._gpus, first=self._config.first_gpu)
            if not settings.engine.is_emulated
            else {},
        )
        self._running[placement.name] = placement
        host = target.rpartition(":")[0]
        self._replicas[placement.name] = [
            Replica(f"{host}:{port + index}", placement.tensor_parallel, placement.pipeline_parallel)
            for index in range(placement.num_replicas)
        ]


def machine(config: NodeConfig, *, trains: bool) -> pb.Node:
    """The machine's description for the scheduler."""
    roles = [pb.ROLE_GENERATOR, *([pb.ROLE_TRAINER] if trains else [])]
    if config.critic is not None and config.critic.checkpoint_storage is not None:
        # One that keeps its state on this machine's disk cannot move here.
        roles.append(pb.ROLE_CRITIC)
    node = this_machine(node_id=config.node_id, site=config.site, roles=roles)
    node.address = config.address
    del node.accelerators[:]
    node.accelerators.add(kind=config.gpu, count=config.gpus)
    if config.price_per_hour is not None:
        node.price_per_hour = config.price_per_hour
    return node
