"""Divides the experts of a mixture over processes that each have tokens of their own (expert parallel).

Each process holds whole experts. In every layer, each token travels to the processes that hold its experts, and their
answers travel back, where they are weighed and added up; gradients take the same ways backwards. So an expert's
gradient is at once that of the tokens of all these processes. Everything else in the model is held as without it.

Invariants:
- All processes pass through all layers together; one without tokens for its experts computes one row of zeros, so that
  its backward pass meets the others'.

Source: Lepikhin et al., GShard (arXiv 2006.16668), section 3.2; no expert has a limited capacity here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from services.trainer.distributed.split_layers import split_parameters
from services.trainer.model.backend import UnsupportedModelError

FAMILIES = frozenset(("olmoe", "qwen3_moe"))
"""Model types with mixtures of experts whose modules have the names below, and which are tested."""
_EXPERTS = "experts"


class ExpertMesh:
    """The processes that divide experts, seen from one of them.

    Args:
        mesh: Of one dimension: those processes.
        shards: The processes over which what each of them has is sharded further, perhaps with copies (FSDP2).
        num_shards: How many.
    """

    def __init__(self, mesh: DeviceMesh, *, shards: DeviceMesh, num_shards: int) -> None:
        self._mesh = mesh
        self._group = mesh.get_group()
        self._size = mesh.size()
        self._num_shards = num_shards
        self.shards = shards

    def divide(self, model: PreTrainedModel) -> None:
        """Leave it this process' experts of all layers, in place, before or after its weights are read.

        Raises:
            UnsupportedModelError: It is of another family, or its experts cannot be divided so.
        """
        check_experts(model.config, self._size)
        for experts in self.experts_of(model):
            split_parameters(experts, self._mesh, dim=0, num_shards=self._num_shards, direction="expert")
            experts.num_experts //= self._size
            experts.forward = partial(self._routed, experts, experts.forward)

    @staticmethod
    def experts_of(network: nn.Module) -> Iterator[nn.Module]:
        """The experts of each layer."""
        return (module for path, module in network.named_modules() if path.rpartition(".")[2] == _EXPERTS)

    def _routed(
        self,
        experts: nn.Module,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
        hidden_th: Tensor,
        index_tk: Tensor,
        weights_tk: Tensor,
    ) -> Tensor:
        """What all experts answer, [T, H], where `compute` is the answer of those that are held here."""
        num_held, num_chosen = experts.num_experts, index_tk.shape[1]
        chosen_n, order_n = index_tk.flatten().sort(stable=True)
        leaving_e = chosen_n.bincount(minlength=num_held * self._size)
        coming_e = torch.empty_like(leaving_e)
        dist.all_to_all_single(coming_e, leaving_e, group=self._group)
        num_sent, num_received = (each.view(self._size, -1).sum(1).tolist() for each in (leaving_e, coming_e))
        # In the type in which they are multiplied, which is the smaller one.
        copies_nh = hidden_th[order_n // num_chosen].to(_dtype_of(experts))
        received_rh = self._exchange(copies_nh, num_sent, num_received)
        # Sorted by the process that sent them, then by expert.
        own_e = torch.arange(num_held, device=index_tk.device).repeat(self._size)
        own_r = own_e.repeat_interleave(coming_e, output_size=sum(num_received))
        answered_rh = answered(compute, received_rh, own_r)
        returned_nh = self._exchange(answered_rh, num_received, num_sent)
        weighed_nh = returned_nh * weights_tk.flatten()[order_n, None]
        return weighed_nh[order_n.argsort()].view(-1, num_chosen, hidden_th.shape[1]).sum(1).to(hidden_th.dtype)

    def _exchange(self, rows_nh: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        """Rows for each process in turn, in exchange for what each has for this one."""
        exchanged: Tensor = all_to_all_single_autograd(rows_nh.contiguous(), num_received, num_sent, self._group)
        return exchanged


def check_experts(config: PretrainedConfig, size: int) -> None:
    """Check that `size` processes can divide the experts of such a model. Raises UnsupportedModelError."""
    found = config.name_or_path or config.model_type
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"trainer.parallel.expert: experts of {config.model_type} cannot be divided, only those of "
            f"{', '.join(sorted(FAMILIES))}; leave it 1"
        )
    if config.num_experts % size:
        raise UnsupportedModelError(
            f"trainer.parallel.expert: {size} does not divide num_experts {config.num_experts} of {found}; change it"
        )


def answered(compute: Callable[[Tensor, Tensor, Tensor], Tensor], rows_rh: Tensor, own_r: Tensor) -> Tensor:
    """The experts' answers to rows, [R, H]; without any they compute zeros, for gradients that others wait for."""
    num_rows = len(rows_rh)
    if not num_rows:
        rows_rh = torch.cat((rows_rh, rows_rh.new_zeros(1, rows_rh.shape[1])))
        own_r = own_r.new_zeros(1)
    return compute(rows_rh, own_r[:, None], rows_rh.new_ones(len(rows_rh), 1))[:num_rows]


def _dtype_of(experts: nn.Module) -> torch.dtype:
    """Of the weights with which they compute now."""
    dtype: torch.dtype = getattr(experts, next(iter(experts._parameters))).dtype
    return dtype
