"""A vLLM worker that can be told to take versions by vLLM's layerwise reload, as one on a GPU does."""

from __future__ import annotations

from services.generator.engines.vllm.worker_extension import PenstockWorkerExtension


class LayerwiseWorkerExtension(PenstockWorkerExtension):
    """Refills as ever until it is told."""

    def penstock_reload_layerwise(self, is_layerwise):
        if is_layerwise:
            self.weight_transfer_engine._can_refill = lambda: False
        else:
            del self.weight_transfer_engine._can_refill
