"""A vLLM worker whose memory fails once: one bit of one tensor is not what was loaded."""

from __future__ import annotations

import torch
from vllm.lora import lora_model

from services.generator import vllm_worker
from services.generator.vllm_worker import PenstockWorkerExtension


class FlippingWorkerExtension(PenstockWorkerExtension):
    """Flips a bit of a tensor of the next installation, between the file and the engine's own memory."""

    _flipped_name = None

    def penstock_flip_next(self, name):
        self._flipped_name = name
        return []

    def penstock_install(self, path):
        name, self._flipped_name = self._flipped_name, None
        if name is None:
            return super().penstock_install(path)
        true_tensors = vllm_worker._with_aliases
        vllm_worker._with_aliases = lambda *arguments: _flipping(true_tensors(*arguments), name)
        try:
            return super().penstock_install(path)
        finally:
            vllm_worker._with_aliases = true_tensors

    def penstock_install_adapter(self, folder, scaling):
        name, self._flipped_name = self._flipped_name, None
        if name is None:
            return super().penstock_install_adapter(folder, scaling)
        true_load = lora_model.LoRAModel.from_lora_tensors.__func__

        def load(cls, *arguments, tensors, **settings):
            return true_load(cls, *arguments, tensors=dict(_flipping(tensors.items(), name)), **settings)

        lora_model.LoRAModel.from_lora_tensors = classmethod(load)
        try:
            return super().penstock_install_adapter(folder, scaling)
        finally:
            lora_model.LoRAModel.from_lora_tensors = classmethod(true_load)


def _flipping(tensors, name):
    for other, tensor in tensors:
        if other == name:
            tensor = tensor.clone()
            tensor.view(torch.uint8).view(-1)[1001] ^= 1
        yield other, tensor
