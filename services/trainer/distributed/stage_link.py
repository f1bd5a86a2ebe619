"""Connects a stage of a pipeline with those beside it: hidden states pass on, and their gradients back (GPipe).

A pack is given to all stages of a pipeline, each of which divides it into the same microbatches of whole trajectories.
All of them pass forward through the stages one after another, then all of them backward, so that the stages work on
different ones at the same time.

Source: Huang et al., GPipe (arXiv 1811.06965).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from services.trainer.batches.packing import Pack, divide
from services.trainer.distributed.process_group import RankGroup
from services.trainer.model.attention import packed_inputs
from services.trainer.model.precision import MASTER

MICROBATCHES_PER_STAGE = 4
"""At most: then the stages wait for each other a fifth of the time at most (GPipe, section 2)."""
Compute = Callable[[dict[str, Any]], Tensor]


class StageLink:
    """What one stage sends and receives; every stage of a pipeline makes the same calls in the same order.

    Args:
        ranks: The processes, this stage's among them.
        hidden: Width of hidden states.
        device: Of this process.
    """

    def __init__(self, ranks: RankGroup, *, hidden: int, device: torch.device) -> None:
        self._ranks = ranks
        self._hidden = hidden
        self._device = device
        self._sent: list[tuple[Any, Tensor]] = []
        """What is on its way to other stages, which must not be freed."""

    @property
    def is_last(self) -> bool:
        """Whether this stage is."""
        return self._ranks.stage.is_last

    def microbatches(self, pack: Pack) -> list[Pack]:
        """The pack's, the same in all stages."""
        return divide(pack, MICROBATCHES_PER_STAGE * self._ranks.num_stages)

    def passed(self, pack: Pack, *, layers: Compute, end: Compute) -> tuple[Tensor | None, Tensor]:
        """A forward pass of this stage over a microbatch: what it received, and what it made of it.

        Args:
            pack: The microbatch.
            layers: From the model's arguments to hidden states, float32[1, T, H], which are sent on.
            end: What the last stage computes instead.
        """
        received = self._received(pack.num_tokens)
        inputs = self.inputs(pack, received)
        if self.is_last:
            return received, end(inputs)
        hidden_1th = layers(inputs)
        self._send(hidden_1th.detach(), self._ranks.stage.index + 1)
        return received, hidden_1th

    def inputs(self, pack: Pack, hidden_1th: Tensor | None = None) -> dict[str, Any]:
        """The model's arguments; without hidden states, which only a first stage does not need, zeros."""
        inputs = packed_inputs(pack, self._device)
        if not self._ranks.stage.is_first:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = self._blank(pack.num_tokens).zero_() if hidden_1th is None else hidden_1th
        return inputs

    def backward(self, modules: Sequence[Any], received: Tensor | None, found: Tensor, *, is_last: bool) -> None:
        """A backward pass of this stage over a microbatch.

        Args:
            modules: Those that were called, sharded each for itself.
            received: What the forward pass received.
            found: What it made: hidden states, or the loss of the last stage.
            is_last: Of the pack's microbatches.
        """
        # Gradients are summed, and weights gathered, over a stage once a pack: they have their own microbatches.
        for module in modules:
            module.set_is_last_backward(is_last)
            module.set_requires_gradient_sync(is_last)
            module.set_reshard_after_backward(is_last)
        if self.is_last:
            found.backward()
        else:
            gradient = torch.empty_like(found)
            dist.recv(gradient, self._ranks.rank_of_stage(self._ranks.stage.index + 1))
            found.backward(gradient)
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, self._ranks.stage.index - 1)

    def settle(self) -> None:
        """Wait until all has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    @staticmethod
    @contextmanager
    def gathered(networks: Sequence[Any]) -> Iterator[None]:
        """While a pack passes, keep the weights that it gathers; then free them.

        Gathered once a pack, and not for each microbatch, of which the processes of a stage have unlike numbers.
        """
        for network in networks:
            network.set_reshard_after_forward(False)
        try:
            yield
        finally:
            for network in networks:
                network.set_reshard_after_forward(True)
                for module in network.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

    def _received(self, num_tokens: int) -> Tensor | None:
        if self._ranks.stage.is_first:
            return None
        hidden_1th = self._blank(num_tokens)
        dist.recv(hidden_1th, self._ranks.rank_of_stage(self._ranks.stage.index - 1))
        return hidden_1th.requires_grad_(torch.is_grad_enabled())

    def _send(self, tensor: Tensor, stage: int) -> None:
        tensor = tensor.to(MASTER).contiguous()
        self._sent.append((dist.isend(tensor, self._ranks.rank_of_stage(stage)), tensor))

    def _blank(self, num_tokens: int) -> Tensor:
        return torch.empty(1, num_tokens, self._hidden, dtype=MASTER, device=self._device)
