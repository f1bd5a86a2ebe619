"""Starts and stops scorers, the critic and reward workers of one machine, as a plan moves them.

Scorers and reward workers hold nothing that another one could not do again, so those that a revision has elsewhere
serve on until the new ones are there, unless something else is to have their GPUs. A critic ends first: one takes
steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import structlog

from console.config.derive import local_endpoint
from console.devices.nvidia_smi import GpuDevice
from console.launch.ports import free_block
from console.launch.service_group import ServiceProcesses
from console.node.config import NodeConfig
from console.node.gpus import visible
from console.node.scoring import (
    CRITIC,
    REWARD,
    SCORER,
    ScoringPlace,
    changed,
    scoring_config,
    scoring_places,
    worker_ids,
)
from penstock.clients.broker import BrokerClient
from penstock.errors import PenstockError
from penstock.process.tasks import end
from penstock.security import Security
from penstock.v1 import scheduler_pb2 as pb

SUCCESSORS_S = 180.0
"""Longest wait for those that take over: they load a model, or fetch it before."""
_LOOK_S = 1.0
_log = structlog.get_logger()


class ScoringProcesses:
    """Those of one machine.

    Args:
        config: The machine.
        services: Keeps them running.
        gpus: The machine's GPUs as its plan counts them; empty where no process is shown any.
        security: Credentials of the process.
    """

    def __init__(
        self, config: NodeConfig, *, services: ServiceProcesses, gpus: Sequence[GpuDevice], security: Security
    ) -> None:
        self._config = config
        self._services = services
        self._gpus = gpus
        self._security = security
        self._running: dict[str, ScoringPlace] = {}
        self._targets: dict[str, str] = {}
        self._coming: list[ScoringPlace] = []
        self._retiring: list[asyncio.Task[None]] = []

    async def make_room(self, plan: pb.Plan, *, taken: Collection[int]) -> None:
        """End what the plan does not have here, at once or once others are in its place.

        Args:
            plan: In force from now on.
            taken: GPUs that the plan gives to something else on this machine.
        """
        await end(*self._retiring)
        wanted = scoring_places(plan, self._config)
        leaving, coming = changed(self._running, wanted)
        self._coming = [wanted[name] for name in coming]
        needed = {*taken, *(gpu for place in self._coming for gpu in place.gpus)}
        later = {
            name: successors
            for name in leaving
            if not needed.intersection(self._running[name].gpus)
            and (successors := self._successors(plan, self._running[name]))
        }
        await self._stop([name for name in leaving if name not in later])
        self._retiring = [asyncio.create_task(self._retire(name, ids)) for name, ids in later.items()]

    def start(self) -> None:
        """Start what the plan has here, after `make_room`."""
        for place in self._coming:
            settings = scoring_config(self._config, place, free_port=free_block(1))
            target = local_endpoint(settings.listen).target
            self._services.launch_service(
                place.kind,
                settings,
                name=place.name,
                target=target,
                environment=visible(place.gpus, self._gpus, first=self._config.first_gpu)
                if self._gpus and place.gpus
                else {},
            )
            self._running[place.name] = place
            self._targets[place.name] = target
        self._coming = []

    def measured_targets(self) -> Mapping[str, str]:
        """The kind of each process here whose speed says something about the plan's machines, by address, host:port.

        Emulated generators stand for GPUs that scorers and a critic do not have.
        """
        kinds = {REWARD} if self._config.generator.engine.is_emulated else {REWARD, SCORER, CRITIC}
        return {
            target: self._running[name].kind
            for name, target in self._targets.items()
            if self._running[name].kind in kinds
        }

    async def stop(self, *, within_s: float | None = None) -> None:
        """End them all."""
        await end(*self._retiring)
        await self._stop(list(self._running), within_s=within_s)

    async def _stop(self, names: Sequence[str], *, within_s: float | None = None) -> None:
        await self._services.stop(names, within_s=within_s)
        for name in names:
            del self._running[name]
            del self._targets[name]

    def _successors(self, plan: pb.Plan, place: ScoringPlace) -> frozenset[str]:
        """Workers that the plan has in place of one here, which do not run on this machine yet; none of a critic."""
        own = {f"{self._config.node_id}-{name}" for name in self._running}
        return frozenset() if place.kind == CRITIC else worker_ids(plan, place.kind) - own

    async def _retire(self, name: str, successors: frozenset[str]) -> None:
        """End a worker once the broker knows those that take over, or after SUCCESSORS_S."""
        _log.info("serves on until others are there", name=name, others=sorted(successors))
        place = self._running[name]
        settings = self._config.scorer if place.kind == SCORER else self._config.reward
        assert settings is not None
        try:
            async with (
                asyncio.timeout(SUCCESSORS_S),
                BrokerClient(settings.broker, security=self._security, patience_s=0) as broker,
            ):
                while not successors <= await _connected(  # noqa: ASYNC110 - another process's state sets no event here
                    broker, settings.run_id, place.kind
                ):
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            _log.warning("ends although others are not there", name=name, others=sorted(successors))
        await self._stop([name])


async def _connected(broker: BrokerClient, run_id: str, kind: str) -> frozenset[str]:
    """Ids of the run's workers of a kind; none while the broker is away."""
    try:
        run = await broker.get_run(run_id)
    except PenstockError:
        return frozenset()
    return frozenset(run.scorer_ids if kind == SCORER else run.reward_worker_ids)
