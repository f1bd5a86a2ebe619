"""A vLLM worker that runs out of memory for real: the system grants its process no more, and a step asks for it.

Its memory can be made to fail, too, so that one engine serves for both faults.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from tests.helpers.generators.flipping_worker import FlippingWorkerExtension

SPARE_BYTES = 2**30
ASKED_FLOATS = 2**30


class ExhaustedWorkerExtension(FlippingWorkerExtension):
    """Limits its own process, and allocates beyond the limit in the next step."""

    def penstock_exhaust(self):
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit_bytes = num_pages * resource.getpagesize() + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
        execute = self.model_runner.execute_model

        def execute_beyond(*arguments, **settings):
            torch.empty(ASKED_FLOATS, dtype=torch.float32)
            return execute(*arguments, **settings)

        self.model_runner.execute_model = execute_beyond
