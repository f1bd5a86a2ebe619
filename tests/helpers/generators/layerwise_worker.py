"""A vLLM worker that can be told to take versions by vLLM's layerwise reload, as one on a GPU does.

Its memory can be made to fail, too, so that one engine serves for both.
"""

from __future__ import annotations

from tests.helpers.generators.flipping_worker import FlippingWorkerExtension


class LayerwiseWorkerExtension(FlippingWorkerExtension):
    """Refills as ever until it is told."""

    def penstock_reload_layerwise(self, is_layerwise):
        if is_layerwise:
            self.weight_transfer_engine._can_refill = lambda: False
        else:
            del self.weight_transfer_engine._can_refill
