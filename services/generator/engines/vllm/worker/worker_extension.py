"""Extends a vLLM worker: loads versions from files, and attests that they are what decodes.

Runs inside vLLM's engine process (`worker_extension_cls`). `penstock_attest` compares every value that the model
decodes with against the checkpoint. Only the engine, which gets all workers' results, can tell which tensors no worker
has: with pipeline stages each worker loads only a part of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from services.generator.engine.install_progress import give_sign
from services.generator.engines.vllm.comparison import Comparison
from services.generator.engines.vllm.process_setup import TRANSFER_BACKEND
from services.generator.engines.vllm.worker.checkpoint_files import complete_origins, open_checkpoint, origins_of
from services.generator.engines.vllm.worker.lora_slot import install_adapter
from services.generator.engines.vllm.worker.readback import held_tensors
from services.generator.engines.vllm.worker.route_recording import RouteRecording

# vLLM's own extension point: a worker looks it up by this name, in this process, before it loads the model.
WeightTransferEngineFactory.register_engine(
    TRANSFER_BACKEND, "services.generator.engines.vllm.worker.weight_transfer", "FileTransferEngine"
)


if current_platform.is_cpu():
    # Registers the kernels that the worker's settings name, before the worker reads those.
    import services.generator.engines.vllm.kernels  # noqa: F401


class PenstockWorkerExtension:
    """Methods mixed into vLLM's worker and called by name through `collective_rpc`."""

    model_runner: Any

    def penstock_make_stage_buffers(self) -> None:
        """Makes the buffers for what the previous pipeline stage sends, where vLLM 0.32 did not.

        It makes them in the forward pass that warms a worker up, which a CPU worker leaves out.
        """
        runner = self.model_runner
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def penstock_record_routes(self) -> None:
        """Records the experts of each token from now on, where the model runner does not."""
        if not hasattr(self.model_runner, "aux_output_connector"):
            RouteRecording(self.model_runner)

    def penstock_install_adapter(self, folder: str, scaling: float) -> Comparison:
        """Loads the adapter of one PEFT folder; returns what `penstock_attest` does, of the adapter's tensors."""
        return install_adapter(self, folder, scaling)

    def penstock_attest(self, paths: Sequence[str]) -> Comparison:
        """Compares this worker's part of the model with the checkpoint."""
        model: nn.Module = self.model_runner.get_model()
        differing: set[str] = set()
        equal: set[str] = set()
        with torch.inference_mode(), open_checkpoint(paths) as checkpoint:
            for held in held_tensors(model):
                give_sign(paths[0])
                name = held.name if held.name in checkpoint else held.tied_name
                if name is None or name not in checkpoint or not held.matches(checkpoint[name].read()):
                    differing.add(held.name)
                else:
                    equal.add(name)
            equal = complete_origins(equal - differing, checkpoint)
            return {"differing": sorted(origins_of(differing, checkpoint)), "equal": sorted(equal)}
