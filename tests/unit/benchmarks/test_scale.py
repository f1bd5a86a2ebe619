"""What `penstock bench scale` works out from what it measures: quantiles, needs of fleets, a fleet as queues."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.scale import suite
from benchmarks.scale.meters import Metrics, quantile
from benchmarks.scale.needs import Assumptions, Costs, needs
from benchmarks.scale.simulation import Fleet, simulate

ASSUMED = Assumptions(tokens_per_gpu_s=1_000.0, samples_per_gpu=100, mean_tokens=1_000.0)
COSTS = Costs(
    us_per_chunk=10.0,
    us_per_token=0.1,
    us_per_request=100.0,
    us_per_lease=100.0,
    us_per_group=800.0,
    us_per_heartbeat=200.0,
    us_per_lease_kept=1.0,
    redis_us_per_chunk=5.0,
    redis_us_per_token=0.0,
    redis_bytes_per_chunk=100.0,
    redis_bytes_per_token=10.0,
)


def read(registry: CollectorRegistry) -> Metrics:
    """What a scrape would show."""
    values: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return Metrics(values)


def test_quantiles_are_of_what_was_observed_in_between() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("stall", "Stalls", buckets=(1.0, 2.0, 4.0), registry=registry)
    histogram.observe(3.0)
    before = [read(registry)]
    assert quantile(before, before, "stall", 0.5) == 0.0
    for seconds in (0.5, 0.5, 1.5, 9.0):
        histogram.observe(seconds)
    after = [read(registry)]
    assert quantile(before, after, "stall", 0.5) == 1.0
    assert quantile(before, after, "stall", 0.75) == 2.0
    assert quantile(before, after, "stall", 1.0) == 4.0


def test_needs_follow_from_the_costs() -> None:
    found = needs(100, ASSUMED, COSTS)
    # 50,000 chunks, 100,000 tokens and 500 requests a second; 100 samples; 50 heartbeats of 100 leases.
    assert found["run_owner_cores"] == pytest.approx((100 * (100 + 100) + 50 * (200 + 100)) / 1e6)
    assert found["broker_cores"] == 1
    assert needs(1_000, ASSUMED, COSTS)["broker_cores"] == 9
    assert needs(1_000, ASSUMED, COSTS)["redis_nodes"] == 4
    assert needs(1_000, ASSUMED, COSTS)["run_owner_keeps_up"]
    large = needs(8_000, ASSUMED, COSTS)
    assert not large["run_owner_keeps_up"]
    assert large["broker_cores_eased"] < large["broker_cores"] / 2
    assert large["mb_per_s"] == pytest.approx(80 * found["mb_per_s"])


def test_a_fleet_that_brokers_can_carry_waits_for_little() -> None:
    found = simulate(Fleet(num_generators=100, num_brokers=2, seconds=20.0), ASSUMED, COSTS)
    assert found["keeps_up"]
    assert found["run_owner"]["flush_interval_s"] == 0.2
    assert found["run_owner"]["load"] == pytest.approx(0.28 + 0.035, rel=0.1)
    assert found["run_owner"]["waits_ms"]["heartbeat"]["max"] < 200.0
    assert "heartbeat" not in found["others"]["waits_ms"]


def test_brokers_that_fall_behind_get_larger_chunks() -> None:
    found = simulate(Fleet(num_generators=800, num_brokers=2, seconds=40.0), ASSUMED, COSTS)
    assert found["others"]["flush_interval_s"] > 0.3
    assert found["others"]["queue_s"] < 1.0


def test_a_run_owner_that_cannot_keep_up_is_said_not_to() -> None:
    costs = replace(COSTS, us_per_lease_kept=100.0)
    found = simulate(Fleet(num_generators=800, num_brokers=8, seconds=20.0), ASSUMED, costs)
    assert not found["keeps_up"]
    assert found["run_owner"]["queue_s"] > 10.0
    assert found["others"]["queue_s"] < 1.0


def test_without_chunks_and_a_fleet_there_are_no_costs() -> None:
    chunks = {"us_per_chunk": 12.0, "us_per_token": -0.1, "us_per_request": 90.0}
    assert suite.costs_of({"chunks": chunks}) is None
    windows = {
        size: {"redis_us_per_chunk": us, "redis_read_bytes_per_chunk": read, "redis_sent_bytes_per_chunk": 10.0}
        for size, us, read in (("2", 4.0, 120.0), ("64", 10.2, 740.0))
    }
    fleet = {"us_per_lease": 90.0, "us_per_group_delivered": 500.0, "us_per_heartbeat": 300.0, "us_per_lease_kept": 2.0}
    fleet["chunks"] = windows
    costs = suite.costs_of({"chunks": chunks, "fleet": fleet})
    assert costs is not None
    # A cost below zero is noise.
    assert (costs.us_per_chunk, costs.us_per_token) == (12.0, 0.0)
    assert costs.redis_us_per_token == pytest.approx(0.1)
    assert costs.redis_bytes_per_chunk == pytest.approx(100.0 + 10.0)
    assert costs.redis_bytes_per_token == pytest.approx(10.0)
