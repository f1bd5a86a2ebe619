"""Records the experts that routers choose in a vLLM worker whose model runner cannot do so by itself.

vLLM 0.32 records them in the newer of its two model runners, which GPUs have. Its capture in the routers, its store by
KV block (a cached prefix keeps its rows) and its scheduler's part know neither runner; so on a CPU they are joined here
to the older one.

Runs inside vLLM's engine process.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.v1.core.sched.output import SchedulerOutput


class RouteRecording:
    """Adds rows of routes to what a runner returns after each step."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._connector = get_aux_output_connector(runner.get_model(), runner.vllm_config, runner.kv_cache_config)
        self._pending: PendingAuxOutput | None = None
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens

    def execute_model(self, scheduler_output: SchedulerOutput, *others: Any, **named: Any) -> Any:
        """The forward pass of a step, whose rows are kept until its tokens are sampled."""
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = self._execute(scheduler_output, *others, **named)
        if scheduler_output.total_num_scheduled_tokens:
            batch = self._runner.input_batch
            num_tokens = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
            rows = SimpleNamespace(
                req_ids=batch.req_ids,
                query_start_loc_np=np.cumsum([0, *num_tokens]),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(num_tokens)].copy(),
            )
            self._pending = self._connector.prepare_output(rows)
        return result

    def sample_tokens(self, *given: Any, **named: Any) -> Any:
        """Samples the step's tokens, and adds the rows of the positions that they were drawn from."""
        output = self._sample(*given, **named)
        pending, self._pending = self._pending, None
        if pending is not None:
            sampled = [output.sampled_token_ids[output.req_id_to_index[name]] for name in pending.request_ids]
            num_sampled = np.array([len(token_ids) for token_ids in sampled])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output
