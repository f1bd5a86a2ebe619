"""The processes of one trainer: their group, the model sharded over it (FSDP2), and messages between them.

The model's collectives (NCCL between GPUs, gloo between CPUs), messages, checkpoints and publications (gloo) each run
in a group of their own, so that none waits for another. Messages are safetensors: nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import PreTrainedModel

from penstock.model.adapter_layout import weight_files
from penstock.model.digests import manifest_digest
from services.trainer.distributed.expert_mesh import ExpertMesh
from services.trainer.distributed.island_gradients import Islands
from services.trainer.distributed.split_layers import DIMENSION, SplitLayers
from services.trainer.distributed.stages import Stage
from services.trainer.model.backend import BackendError
from services.trainer.model.precision import MASTER
from services.trainer.model.ranks import Ranks
from services.trainer.model_state.agreement import Writers
from services.trainer.model_state.weight_digests import tensors_together

COMPUTE_TIMEOUT = timedelta(minutes=10)
"""Maximum wait of one process for another in a forward or backward pass, and for all to join."""
IDLE_TIMEOUT = timedelta(hours=12)
"""Maximum wait for the next message. A dying coordinator closes its connections, which is noticed at once."""
MAX_MESSAGE_BYTES = 2**30
_CALL = "call"

Arrays = dict[str, npt.NDArray[Any]]


class RankGroup(Ranks):
    """Several processes that train together; one group a process at a time.

    Args:
        store: Where the processes find each other.
        rank: The rank of this process.
        num_ranks: The number of processes.
        local_rank: The index of its GPU on this machine.
        device: trainer.device of the run.
        num_replicas: Groups of processes that each hold a whole copy of the model; a divisor of their number.
        num_stages: Stages of layers into which each group cuts it, each held by one process; a divisor likewise.
        num_splits: Processes that split each layer between them; a divisor likewise.
        expert_size: Processes that divide experts between them; a divisor of those that shard one copy.
        islands: Processes of each island, which all hold a copy of the model sharded over them; instead of the others.
    """

    def __init__(  # noqa: PLR0913  # the directions of its mesh
        self,
        store: dist.Store,
        *,
        rank: int,
        num_ranks: int,
        local_rank: int,
        device: str,
        num_replicas: int = 1,
        num_stages: int = 1,
        num_splits: int = 1,
        expert_size: int = 1,
        islands: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._islands = Islands(islands or (num_ranks,), rank=rank)
        self.num_shards = (
            islands[self._islands.own] if islands else num_ranks // (num_replicas * num_stages * num_splits)
        )
        self.num_stages = num_stages
        self.num_splits = num_splits
        self.num_expert_shards = expert_size
        self.stage_index = rank // self.num_shards % num_stages if num_stages > 1 else 0
        self.stage = Stage(index=self.stage_index, num_stages=num_stages)
        self._device = _device_of(device, local_rank)
        # PyTorch remembers results with their mesh, and would take an equal one of an earlier run for this run's.
        _clear_sharding_prop_cache()
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=COMPUTE_TIMEOUT)
        self._messages = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self.checkpoint_group = dist.new_group(backend="gloo", timeout=COMPUTE_TIMEOUT)
        self.publish_group = dist.new_group(backend="gloo", timeout=COMPUTE_TIMEOUT)
        self._between_islands = dist.new_group(timeout=COMPUTE_TIMEOUT) if islands else None
        self._split_layers: SplitLayers | None = None
        self._expert_mesh: ExpertMesh | None = None
        self._mesh = self._island_mesh() if islands else self._make_mesh(num_replicas, expert_size)
        self.ends = self._make_ends() if num_stages > 1 else None
        """The first and the last stage of this process' pipeline; None in other stages."""

    def _make_mesh(self, num_replicas: int, expert_size: int) -> DeviceMesh:
        # Neighbours share layers, or else a copy: they are on one machine, and exchange most.
        sizes = (num_replicas, self.num_stages, self.num_shards, self.num_splits)
        names = ("replicate", "pipeline", "shard", DIMENSION)
        mesh = init_device_mesh(self._device.type, sizes, mesh_dim_names=names)
        if self.num_splits > 1:
            # By which PyTorch adds up norms at once.
            mesh["shard", DIMENSION]._flatten()
            self._split_layers = SplitLayers(mesh[DIMENSION], num_shards=self.num_shards)
        if expert_size > 1:
            num_shards = self.num_shards // expert_size
            divided = mesh["shard"]._unflatten(0, (num_shards, expert_size), ("expert_shard", "expert"))
            # By which PyTorch adds up norms at once.
            divided._flatten()
            shards = divided["expert_shard"]
            if num_replicas > 1:
                shards = DeviceMesh._concatenate([mesh["replicate"], shards])
            self._expert_mesh = ExpertMesh(divided["expert"], shards=shards, num_shards=num_shards)
        return mesh["shard"] if num_replicas == 1 else mesh["replicate", "shard"]

    def _island_mesh(self) -> DeviceMesh:
        # Every process takes part in making every group.
        groups = [dist.new_group(list(ranks), timeout=COMPUTE_TIMEOUT) for ranks in self._islands.ranks]
        return DeviceMesh.from_group(groups[self._islands.own], self._device.type)

    def _make_ends(self) -> dist.ProcessGroup | None:
        width = self.num_stages * self.num_shards
        # Every process takes part in making every group.
        pairs = [
            (first + column, first + width - self.num_shards + column)
            for first in range(0, self.num_ranks, width)
            for column in range(self.num_shards)
        ]
        made = {pair: dist.new_group(pair, timeout=COMPUTE_TIMEOUT) for pair in pairs}
        return next((group for pair, group in made.items() if self.rank in pair), None)

    @property
    def leads_stage(self) -> bool:
        """Whether this process is the first of its stage in the first copy of the model."""
        width = self.num_shards * self.num_splits
        return self.rank % width == 0 and self.rank < self.num_stages * width

    @property
    def elsewhere(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        """Of the other stages."""
        return self.stage.elsewhere

    @property
    def copies(self) -> frozenset[str]:  # type: ignore[override]
        """Those that the last stage shares with the first."""
        return self.stage.shared if self.stage.is_last else frozenset()

    @property
    def scorers(self) -> tuple[int, ...]:  # type: ignore[override]
        """The processes that know results, one for each pack: those of the last stage, and the first of each split."""
        if self.num_splits > 1:
            return tuple(range(0, self.num_ranks, self.num_splits))
        last = self.num_stages - 1
        return tuple(rank for rank in range(self.num_ranks) if rank // self.num_shards % self.num_stages == last)

    def pack_of(self, rank: int) -> int:
        """Which of the packs is a process'; stages of a pipeline, and those that split layers, have one together."""
        if self.num_splits > 1:
            return rank // self.num_splits
        width = self.num_stages * self.num_shards
        return rank // width * self.num_shards + rank % self.num_shards

    def rank_of_stage(self, stage: int) -> int:
        """The process of another stage in this process' pipeline."""
        return self.rank + (stage - self.stage.index) * self.num_shards

    def cut(self, model: PreTrainedModel, layers_per_stage: Sequence[int] | None, *, has_output: bool = True) -> None:
        """Leave it the modules of this stage, and of these what is this process'."""
        if self.num_stages > 1:
            self.stage.cut(model, layers_per_stage, has_output=has_output)
        if self._split_layers is not None:
            self._split_layers.split(model)
        if self._expert_mesh is not None:
            self._expert_mesh.divide(model)

    def split_adapter(self, model: PreTrainedModel) -> None:
        """Split the factors like the layers that they adapt."""
        if self._split_layers is not None:
            self._split_layers.split_adapter(model)

    def device(self, name: Literal["auto", "cpu", "cuda"]) -> torch.device:
        """The GPU of this process, or the CPU."""
        return self._device

    def shard(self, network: nn.Module, *, computing: torch.dtype) -> None:
        """Shards by FSDP2: one unit for each layer declared by the model's authors, and one for the rest."""
        policy = MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=MASTER, cast_forward_inputs=False)
        # Pinned memory is copied while the device computes; without a GPU there is none.
        rest = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self.offloads else OffloadPolicy()
        if self._expert_mesh is not None:
            for experts in [*self._expert_mesh.experts_of(network)]:
                fully_shard(experts, mesh=self._expert_mesh.shards, mp_policy=policy, offload_policy=rest)
        names = set(getattr(network, "_no_split_modules", None) or ())
        for module in [module for module in network.modules() if type(module).__name__ in names]:
            fully_shard(module, mesh=self._mesh, mp_policy=policy, offload_policy=rest)
        # Gathered weights must not outlive a forward pass: after one without gradients they would become stale.
        fully_shard(network, mesh=self._mesh, mp_policy=policy, offload_policy=rest, reshard_after_forward=True)
        for module in network.modules():
            if isinstance(module, FSDPModule):
                # Losses are sums, and so are gradients; gloo cannot scale them otherwise.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def whole(self, tensor: Tensor) -> Tensor:
        """Gathers a sharded tensor."""
        if not isinstance(tensor, DTensor):
            return tensor
        full = tensor.full_tensor()
        return full.cpu() if self.leads_stage else full.new_empty(0)

    def total(self, tensor: Tensor) -> Tensor:
        """Adds up over the mesh."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def model_digest(self, directory: Path) -> str:
        """Divided over all processes."""
        writers = Writers(rank=self.rank, num_ranks=self.num_ranks, group=self.publish_group)
        paths = weight_files(directory)
        return manifest_digest(
            [tensor for path in paths for tensor in tensors_together(path, writers=writers, algorithm="sha256")]
        )

    def is_copy(self, tensor: Tensor) -> bool:
        """What is sharded is written by the first island, and what is not split by the first of those that split."""
        if not isinstance(tensor, DTensor):
            return False
        if self._split_layers is not None and not self._split_layers.has_split(tensor):
            return self.rank % self.num_splits > 0
        return self._islands.own > 0

    def sum_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Over islands or processes that split layers; copies of one mesh sum them in each backward pass."""
        if self._between_islands is not None:
            self._islands.sum_gradients([*gradients.values()], group=self._between_islands)
        if self._split_layers is not None:
            self._split_layers.sum_gradients(gradients)

    def whole_norm(self, norm: float) -> float:
        """Of the stages of this process' pipeline, each once; of islands the first one's."""
        if self._between_islands is not None or self.num_splits > 1:
            # Each adds up its shards in an order of its own, and clipping by other numbers would part the copies.
            shared = torch.tensor(norm, dtype=torch.float64)
            dist.broadcast(shared, 0, group=self._messages)
            return float(shared)
        if self.num_stages == 1:
            return norm
        # Every copy of a stage has the same norm, and the sum is over all processes.
        squares = torch.tensor(norm**2, dtype=torch.float64) * self.num_stages / self.num_ranks
        dist.all_reduce(squares, group=self._messages)
        return math.sqrt(float(squares))

    def added_up(self, count: int) -> int:
        """An all-reduce of the message group."""
        total = torch.tensor(count)
        dist.all_reduce(total, group=self._messages)
        return int(total)

    def smallest(self, number: int) -> int:
        """An all-reduce of the message group."""
        least = torch.tensor(number)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._messages)
        return int(least)

    def agree(self, is_so: bool) -> bool:
        """The smallest verdict."""
        return bool(self.smallest(int(is_so)))

    def send(self, call: dict[str, Any], arrays: Arrays | None = None, *, to: int) -> None:
        """One message: JSON and arrays."""
        words = np.frombuffer(json.dumps(call, default=str).encode(), dtype=np.uint8)
        content = bytearray(safetensors.numpy.save({_CALL: words, **(arrays or {})}))
        dist.send(torch.tensor(len(content)), to, group=self._messages)
        dist.send(torch.frombuffer(content, dtype=torch.uint8), to, group=self._messages)

    def receive(self, *, sender: int) -> tuple[dict[str, Any], Arrays]:
        """The next message of another process.

        Raises:
            BackendError: It is not a message.
        """
        size = torch.tensor(0)
        dist.recv(size, sender, group=self._messages)
        if not 0 < int(size) <= MAX_MESSAGE_BYTES:
            raise BackendError(f"process {sender} announces a message of {int(size)} bytes")
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(content, sender, group=self._messages)
        arrays = safetensors.numpy.load(content.numpy().tobytes())
        call: dict[str, Any] = json.loads(arrays.pop(_CALL).tobytes())
        # Copied: the arrays of safetensors are read-only, and PyTorch warns about those.
        return call, {name: array.copy() for name, array in arrays.items()}

    def close(self) -> None:
        """Leave the group; the others do the same."""
        dist.destroy_process_group()


def _device_of(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise BackendError(
            f"trainer.processes: process {local_rank} of this machine has no GPU of its own, there are "
            f"{torch.cuda.device_count()}; lower it, or set trainer.device to cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
