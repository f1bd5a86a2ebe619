"""Implements the bare PyTorch loop: forward and backward per pack, a clipped surrogate, an AdamW step per batch.

Nothing else: no checks, no metrics, no correction, no report. It shares the packs and the attention over packed rows
with the trainer, so that the difference is the trainer's work around PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from services.trainer.batches.packing import Pack
from services.trainer.model.attention import PACKED_ATTENTION, packed_inputs, register_packed_attention

CLIP = 0.2


class BareLoop:
    """A model and its optimiser."""

    def __init__(self, model_dir: Path, *, learning_rate: float, max_grad_norm: float) -> None:
        register_packed_attention()
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype="float32", attn_implementation=PACKED_ATTENTION, local_files_only=True
        ).eval()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0, fused=True
        )
        self._max_grad_norm = max_grad_norm

    def step(self, packs: Sequence[Pack], *, num_tokens: int) -> None:
        """One optimiser step over the packs of a batch with this many loss tokens."""
        for pack in packs:
            self._forward_backward(pack, num_tokens)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def _forward_backward(self, pack: Pack, num_tokens: int) -> None:
        logits = self._model(
            **packed_inputs(pack, torch.device("cpu")), logits_to_keep=torch.from_numpy(pack.logit_positions)
        ).logits[0]
        logprobs = -cross_entropy(logits, torch.from_numpy(pack.target_ids), reduction="none")
        advantages = torch.from_numpy(pack.advantages)
        ratios = torch.exp(logprobs - torch.from_numpy(pack.behavior_logprobs))
        losses = -torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
        (losses.sum() / num_tokens).backward()
