"""Derives the trainer of one machine from a plan: which of its GPUs train, and with which other machines. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from console.config.run_folder import RunFolder
from console.node.config import NodeConfig
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.planning.plan_message import trainers_of
from services.trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlace:
    """This machine's part of the training pool."""

    gpus: tuple[int, ...]
    """Indices on the machine, one for each process."""
    machines: tuple[tuple[str, int], ...]
    """The whole pool: machines in the order of their ranks, the coordinator first, with the number of their GPUs."""
    mesh: str = ""
    """The mesh that they are; another one takes other processes. Empty if they shard one copy."""

    @property
    def num_ranks(self) -> int:
        """Processes of the whole pool."""
        return sum(gpus for _, gpus in self.machines)

    def ranks(self, node_id: str) -> range:
        """Ranks of a machine's processes."""
        names = [name for name, _ in self.machines]
        first = sum(gpus for _, gpus in self.machines[: names.index(node_id)])
        return range(first, first + self.machines[names.index(node_id)][1])


def training_place(plan: pb.Plan, config: NodeConfig) -> TrainingPlace | None:
    """The place that this machine takes in the plan's training pool.

    None if it has none there, cannot take it (see `obstacle`), or has no section `trainer`: then another one trains.
    """
    is_possible = config.trainer is not None and not obstacle(plan, config)
    return _stated_place(plan, config) if is_possible else None


def obstacle(plan: pb.Plan, config: NodeConfig) -> str:
    """Why this machine cannot train as the plan says; empty if it can, or need not."""
    place = _stated_place(plan, config)
    if place is None or config.trainer is None:
        return ""
    if not place.gpus or max(place.gpus) >= config.gpus or min(place.gpus) < config.first_gpu:
        return f"the plan trains on GPUs {', '.join(map(str, place.gpus)) or '(none)'}; there are {config.gpus}"
    return ""


def _stated_place(plan: pb.Plan, config: NodeConfig) -> TrainingPlace | None:
    pool = [each for each in plan.assignments if each.role == pb.ROLE_TRAINER]
    mine = [each for each in pool if each.node_id == config.node_id]
    if not mine:
        return None
    _, mesh = trainers_of(plan)
    return TrainingPlace(
        gpus=tuple(mine[0].accelerator_indices),
        machines=tuple((each.node_id, len(each.accelerator_indices)) for each in pool),
        mesh="" if mesh is None else mesh.model_dump_json(),
    )


def trainer_config(config: NodeConfig) -> TrainerConfig:
    """The configuration of the trainer's process."""
    assert config.trainer is not None
    settings = config.trainer.model_dump(exclude={"run_dir", "rendezvous_port", "checkpoint_storage"})
    if (storage := config.trainer.checkpoint_storage) is not None:
        settings["runs_dir"] = config.trainer.run_dir.expanduser().absolute().parent
        settings["allowed_storage"] = (*config.trainer.allowed_storage, storage)
    settings["insecure"] = config.trainer.insecure or config.insecure
    # Who asked for the run resumes it, here or on the machine that the plan names next.
    settings["state_dir"] = None
    return TrainerConfig.model_validate(settings)


def missing_run(config: NodeConfig) -> str:
    """Why this machine may not train although it has a section `trainer`, with the fix; empty if it may. Reads disk."""
    if config.trainer is None or config.trainer.checkpoint_storage is not None:
        return ""
    if RunFolder(config.trainer.run_dir.expanduser()).config.is_file():
        return ""
    return (
        f"trainer.run_dir: {config.trainer.run_dir} holds no run; share the run's folder with this machine at the path "
        "that the run's own configuration has, or give the run run.checkpoint_storage, and name that here as "
        "trainer.checkpoint_storage"
    )
