"""A vLLM worker whose memory fails once: one bit of one tensor is not what was loaded."""

from __future__ import annotations

import torch
from vllm.lora import lora_model

from services.generator.engines.vllm.worker.weight_transfer import Checkpoint
from services.generator.engines.vllm.worker.worker_extension import PenstockWorkerExtension


class FlippingWorkerExtension(PenstockWorkerExtension):
    """Flips a bit of a tensor of the next installation, between the file and the engine's own memory."""

    _flipped_name = None

    def penstock_flip_next(self, name, only_rank=None):
        """In every worker, or in one alone."""
        if only_rank not in (None, self.rank):
            return
        self._flipped_name = name
        true_read = Checkpoint.read

        def read(checkpoint, asked):
            tensor = true_read(checkpoint, asked)
            if asked != self._flipped_name:
                return tensor
            self._flipped_name = None
            Checkpoint.read = true_read
            return _flipped(tensor)

        Checkpoint.read = read

    def penstock_install_adapter(self, folder, scaling):
        name, self._flipped_name = self._flipped_name, None
        if name is None:
            return super().penstock_install_adapter(folder, scaling)
        true_load = lora_model.LoRAModel.from_lora_tensors.__func__

        def load(cls, *arguments, tensors, **settings):
            return true_load(cls, *arguments, tensors={**tensors, name: _flipped(tensors[name])}, **settings)

        lora_model.LoRAModel.from_lora_tensors = classmethod(load)
        try:
            return super().penstock_install_adapter(folder, scaling)
        finally:
            lora_model.LoRAModel.from_lora_tensors = classmethod(true_load)


def _flipped(tensor):
    tensor = tensor.clone()
    tensor.view(torch.uint8).view(-1)[1001] ^= 1
    return tensor
