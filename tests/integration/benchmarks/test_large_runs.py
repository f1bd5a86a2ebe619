"""The benchmarks of a large run, made small: a real broker process on a real Redis."""

from __future__ import annotations

from benchmarks.broker import memory, restart


async def test_a_broker_started_again_answers_and_loads_the_run() -> None:
    found = await restart.measure(restart.Size(num_live_groups=4, num_retained_groups=128, group_size=2))
    assert found["num_samples_under_way"] == 8
    assert 0 < found["first_call_s"] <= found["whole_s"]


async def test_every_generator_holds_its_samples() -> None:
    found = await memory.measure(memory.Size(num_generators=4, samples_each=16, num_chunks=2, num_workers=1))
    assert found["num_samples"] == 64
    assert 0 < found["idle_mb"] <= found["peak_mb"]
