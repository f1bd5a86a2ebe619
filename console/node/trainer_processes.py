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
from penstock.errors import PenstockError
from penstock.network.rpc import call, open_channel
from penstock.process.tasks import end
from penstock.security import Security
from penstock.v1 import trainer_pb2, trainer_pb2_grpc

TRAINER = "trainer"
_LOOK_S = 1.0
_TIMEOUT_S = 3.0
_log = structlog.get_logger()


class TrainerProcesses:
    """Those of one machine.

    Args:
        config: The machine.
        services: Keeps them running.
        gpus: The machine's GPUs as its plan counts them; empty where no process is shown any.
        find_address: Waits for the address of a machine of the pool.
        is_training: Whether the trainer at an address trains.
        time_scale: Emulated seconds per real second.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        services: ServiceProcesses,
        gpus: Sequence[GpuDevice],
        find_address: Callable[[str], Awaitable[str]],
        is_training: Callable[[str], Awaitable[bool]],
        time_scale: float = 1.0,
    ) -> None:
        self._config = config
        self._services = services
        self._gpus = gpus
        self._find_address = find_address
        self._is_training = is_training
        self._time_scale = time_scale
        self.move_s: float | None = None
        """How long the trainer took to move here last, from the revision until it trained; None if it did not."""
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

    def start(self, place: TrainingPlace, *, asked_s: float | None) -> None:
        """Take a place in the pool, after `stop`; a move is measured from `asked_s` on, in the loop's time."""
        self._place = place
        self._starting = asyncio.create_task(self._start(place, asked_s))

    async def _start(self, place: TrainingPlace, asked_s: float | None) -> None:
        await self._launch_all(place)
        if asked_s is not None and place.machines[0][0] == self._config.node_id:
            assert self._config.trainer is not None
            target = local_endpoint(self._config.trainer.listen).target
            while not await self._is_training(target):  # noqa: ASYNC110 - another process's state sets no event here
                await asyncio.sleep(_LOOK_S)
            self.move_s = self._time_scale * (asyncio.get_running_loop().time() - asked_s)
            _log.info("the trainer has moved here", took_s=round(self.move_s, 1))

    async def _launch_all(self, place: TrainingPlace) -> None:
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
        devices = visible(self._place.gpus, self._gpus, first=self._config.first_gpu) if self._gpus else {}
        self._services.launch_service(
            "trainer",
            settings,
            name=name,
            # Only the coordinator serves.
            target=local_endpoint(settings.listen).target if name == TRAINER else "",
            environment={**devices, **environment},
        )


async def is_training(target: str, *, security: Security) -> bool:
    """Whether the trainer there trains; one that does not answer does not."""
    async with open_channel(target, security) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        try:
            answer = await call(
                stub.GetTrainer, trainer_pb2.GetTrainerRequest(), peer=f"trainer {target}", timeout_s=_TIMEOUT_S
            )
        except PenstockError:
            # It is starting, which is its supervisor's business.
            return False
    return answer.state == trainer_pb2.TRAINER_STATE_TRAINING
