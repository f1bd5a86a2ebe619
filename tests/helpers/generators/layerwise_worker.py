"""A vLLM worker that can be told to take versions by vLLM's layerwise reload, as one on a GPU does.

Its memory can be made to fail, too, so that one engine serves for both.
"""

from __future__ import annotations

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from tests.helpers.generators.flipping_worker import FlippingWorkerExtension


class LayerwiseWorkerExtension(FlippingWorkerExtension):
    """Refills as ever until it is told."""

    def penstock_reload_layerwise(self, is_layerwise):
        if is_layerwise:
            self.weight_transfer_engine._can_refill = lambda: False
        else:
            del self.weight_transfer_engine._can_refill

    def penstock_packed(self):
        """Whether the output heads, and the embeddings that only look up, are packed for products."""
        modules = [each for each in self.model_runner.get_model().modules() if isinstance(each, VocabParallelEmbedding)]
        kinds = [[each for each in modules if isinstance(each, ParallelLMHead) is is_head] for is_head in (True, False)]
        return [[hasattr(each, "cpu_linear") for each in kind] for kind in kinds]
