"""Starts and stops the trainer's processes on one machine of a plan, as its place in the training pool changes.

A pool of one machine is one process, which starts the others itself. In a pool of several each machine starts a process
for each of its GPUs, and tells it as torchrun would (`services.trainer.distributed.launch`) where they meet: at the
first machine of the pool, which holds the coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from console.config.derive import local_endpoint
from console.devices.nvidia_smi import GpuDevice
from console.launch.service_group import ServiceProcesses
from console.node.config import NodeConfig
from console.node.gpus import visible
from console.node.training import TrainingPlace, trainer_config
from penstock.process.tasks import end

TRAINER = "trainer"
_log = structlog.get_logger()


class TrainerProcesses:
    """Those of one machine.

    Args:
        config: The machine.
        services: Keeps them running.
        gpus: The machine's GPUs as its plan counts them; empty where no process is shown any.
        find_address: Waits for the address of a machine of the pool.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        services: ServiceProcesses,
        gpus: Sequence[GpuDevice],
        find_address: Callable[[str], Awaitable[str]],
    ) -> None:
        self._config = config
        self._services = services
        self._gpus = gpus
        self._find_address = find_address
        self._place: TrainingPlace | None = None
        self._starting: asyncio.Task[None] | None = None

    def is_at(self, place: TrainingPlace | None) -> bool:
        """Whether this is the machine's place already."""
        return place == self._place

    async def stop(self) -> None:
        """End them; a checkpoint is written first, which takes as long as it takes."""
        if self._starting is not None:
            await end(self._starting)
        self._place, self._starting = None, None
        await self._services.stop([name for name in self._services.names if name.startswith(TRAINER)])

    def start(self, place: TrainingPlace) -> None:
        """Take a place in the pool, after `stop`."""
        self._place = place
        self._starting = asyncio.create_task(self._start(place))

    async def _start(self, place: TrainingPlace) -> None:
        coordinator = place.machines[0][0]
        _log.info("the trainer starts here", gpus=place.gpus, pool=[name for name, _ in place.machines])
        if len(place.machines) == 1:
            self._launch(TRAINER, {})
            return
        address = self._config.address
        if coordinator != self._config.node_id:
            address = await self._find_address(coordinator)
        for index, rank in enumerate(place.ranks(self._config.node_id)):
            name = TRAINER if rank == 0 else f"{TRAINER}-{rank}"
            self._launch(name, self._meeting(place, address, rank=rank, local_rank=index))

    def _meeting(self, place: TrainingPlace, address: str, *, rank: int, local_rank: int) -> Mapping[str, str]:
        """The variables that torchrun sets for a process."""
        assert self._config.trainer is not None
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(place.num_ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(len(place.gpus)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(self._config.trainer.rendezvous_port),
            "TORCHELASTIC_RUN_ID": self._config.generator.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }

    def _launch(self, name: str, environment: Mapping[str, str]) -> None:
        assert self._place is not None
        settings = trainer_config(self._config)
        devices = visible(self._place.gpus, self._gpus) if self._gpus else {}
        self._services.launch_service(
            "trainer",
            settings,
            name=name,
            # Only the coordinator serves.
            target=local_endpoint(settings.listen).target if name == TRAINER else "",
            environment={**devices, **environment},
        )
