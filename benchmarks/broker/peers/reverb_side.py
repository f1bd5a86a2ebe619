"""Runs Reverb as documented: a queue, written by trajectory writers and read by a dataset.

Runs in Reverb's own environment. An item is lost once delivered, and all are lost when the server ends.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import reverb
import tensorflow as tf

from benchmarks.broker.peers.arrays import NUM_TEMPLATES, Arrays, make_templates
from benchmarks.broker.worker import Ready

TABLE = "trajectories"
UNCONFIRMED_PUTS = 4
"""As many as Penstock's producers leave unacknowledged."""
MICROBATCH = 32
PRODUCER = "producer"
NUMBER = "number"


async def serve(ready: Ready, *, address: str, folder: str, max_queued: int) -> dict[str, Any]:
    """The server's role: serves from readiness until stopped."""
    server = reverb.Server([reverb.Table.queue(TABLE, max_queued)], port=int(address.rpartition(":")[2]))
    await ready()
    server.stop()
    return {}


async def produce(
    ready: Ready, *, address: str, folder: str, run_id: str, name: int, num_tokens: int, num_per_put: int, count: int
) -> dict[str, Any]:
    """A producer's role."""
    templates = make_templates(num_tokens)
    client = reverb.Client(address)
    await ready()
    start_s = time.monotonic()
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for number in range(count):
            writer.append(_step(templates, name, number))
            writer.create_item(TABLE, 1.0, {key: column[-1:] for key, column in writer.history.items()})
            if (number + 1) % num_per_put == 0:
                writer.flush(block_until_num_items=UNCONFIRMED_PUTS * num_per_put)
        writer.flush()
    return {"start_s": start_s}


async def consume(
    ready: Ready, *, address: str, folder: str, run_id: str, num_tokens: int, count: int
) -> dict[str, Any]:
    """The trainer's role: checks every trajectory."""
    templates = make_templates(num_tokens)
    example = _step(templates, 0, 0)
    dataset = reverb.TrajectoryDataset(
        server_address=address,
        table=TABLE,
        dtypes={key: tf.as_dtype(array.dtype) for key, array in example.items()},
        shapes={key: tf.TensorShape([1, *array.shape]) for key, array in example.items()},
        max_in_flight_samples_per_worker=2 * MICROBATCH,
        max_samples=count,
    ).batch(min(MICROBATCH, count))
    await ready()
    seen: set[tuple[int, int]] = set()
    num_bad = 0
    for batch in dataset.as_numpy_iterator():
        data = batch.data
        for row in range(len(data[NUMBER])):
            key = int(data[PRODUCER][row, 0]), int(data[NUMBER][row, 0])
            template = templates[key[1] % NUM_TEMPLATES]
            is_intact = all(np.array_equal(data[each][row, 0], array) for each, array in template.items())
            num_bad += not is_intact or key in seen
            seen.add(key)
    return {"end_s": time.monotonic(), "num_received": len(seen), "num_bad": num_bad}


def _step(templates: list[Arrays], name: int, number: int) -> dict[str, Any]:
    return {PRODUCER: np.int64(name), NUMBER: np.int64(number), **templates[number % NUM_TEMPLATES]}
