"""Runs TransferQueue with defaults: a controller and two storage units, actors of a Ray cluster on this machine.

Producers put batches of rows; the trainer gets batches of new rows and has them cleared. Runs in TransferQueue's own
environment. A row counts as consumed once its metadata is delivered; everything is in memory and lost when the actors
end.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks.broker.peers.arrays import NUM_TEMPLATES, Arrays, make_templates
from benchmarks.broker.worker import Ready

UNANSWERED_PUTS = 4
"""As many as Penstock's producers leave unacknowledged."""
MICROBATCH = 32
NUM_ACTORS = 3
"""Ray starts this many processes at once, used or not."""
POLL_S = 0.002
TASK = "train"
KEY = "key"
FIELDS = (KEY, "prompt_ids", "token_ids", "logprobs", "advantages")
_CLUSTER_FILE = "ray-address"


async def serve(ready: Ready, *, address: str, folder: str, max_queued: int) -> dict[str, Any]:
    """The server's role: serves from readiness until stopped."""
    ray.init(
        address="local",
        namespace="penstock-bench",
        num_cpus=NUM_ACTORS,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    try:
        # With missing rows its controller would wait for them, and take no puts meanwhile.
        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
        (Path(folder) / _CLUSTER_FILE).write_text(ray.get_runtime_context().gcs_address)
        await ready()
        transfer_queue.close()
    finally:
        ray.shutdown()
    return {}


async def produce(
    ready: Ready, *, address: str, folder: str, run_id: str, name: int, num_tokens: int, num_per_put: int, count: int
) -> dict[str, Any]:
    """A producer's role."""
    client = _client(folder)
    columns = _columns(make_templates(num_tokens))
    slots = asyncio.Semaphore(UNANSWERED_PUTS)
    await ready()
    start_s = time.monotonic()

    async def put(first: int) -> None:
        numbers = torch.arange(first, min(count, first + num_per_put))
        rows = {each: column[numbers % NUM_TEMPLATES] for each, column in columns.items()}
        rows[KEY] = torch.stack([torch.full_like(numbers, name), numbers], dim=1)
        async with slots:
            await client.async_put(TensorDict(rows, batch_size=len(numbers)), partition_id=run_id)

    await asyncio.gather(*(put(first) for first in range(0, count, num_per_put)))
    return {"start_s": start_s}


async def consume(
    ready: Ready, *, address: str, folder: str, run_id: str, num_tokens: int, count: int
) -> dict[str, Any]:
    """The trainer's role: checks every trajectory, and has its rows cleared."""
    client = _client(folder)
    templates = make_templates(num_tokens)
    await ready()
    seen: set[tuple[int, int]] = set()
    num_bad = 0
    while len(seen) + num_bad < count:
        size = min(MICROBATCH, count - len(seen) - num_bad)
        meta = await client.async_get_meta(list(FIELDS), size, run_id, task_name=TASK)
        if not meta.size:
            await asyncio.sleep(POLL_S)
            continue
        data = await client.async_get_data(meta)
        rows = {each: data[each].values().reshape(meta.size, -1).numpy() for each in FIELDS}
        for row in range(meta.size):
            key = int(rows[KEY][row, 0]), int(rows[KEY][row, 1])
            template = templates[key[1] % NUM_TEMPLATES]
            is_intact = all(np.array_equal(rows[each][row], array) for each, array in template.items())
            num_bad += not is_intact or key in seen
            seen.add(key)
        await client.async_clear_samples(meta)
    return {"end_s": time.monotonic(), "num_received": len(seen), "num_bad": num_bad}


def _columns(templates: list[Arrays]) -> dict[str, torch.Tensor]:
    return {each: torch.from_numpy(np.stack([arrays[each] for arrays in templates])) for each in templates[0]}


def _client(folder: str) -> Any:
    address = (Path(folder) / _CLUSTER_FILE).read_text()
    if not ray.is_initialized():
        ray.init(address=address, namespace="penstock-bench", log_to_driver=False)
        transfer_queue.init()
    return transfer_queue.get_client()
