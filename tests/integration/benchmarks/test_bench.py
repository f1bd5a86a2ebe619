"""`penstock bench` measures every workload and tells exactly what it promises; never how fast it must be."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.broker.peers import peer
from benchmarks.broker.processes import Stage
from benchmarks.scratch import scratch_folder
from tests.helpers.stores.redis_server import find_redis_server

pytestmark = pytest.mark.timeout(180)
RATES = ("trajectories_per_second", "mb_per_second", "ratio_to_bare_stream", "cpu_s_per_1k")
NUMBERS = {
    "short": RATES,
    "long": RATES,
    "latency": ("p50_ms", "p99_ms"),
    "token_stream": ("tokens_per_second", "broker_core_percent_per_10k_tokens_per_second"),
    "memory": ("redis_bytes_full", "num_samples_waiting"),
    "queue": ("slowdown", "cpu_slowdown"),
}


def test_a_quick_run_prints_every_number_as_json() -> None:
    command = [sys.executable, "-m", "console", "bench", "broker", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for workload, names in NUMBERS.items():
        for name in names:
            value = result[workload][name]
            assert math.isfinite(value), (workload, name)
            assert value >= 0, (workload, name)
    assert result["memory"]["is_bounded"]
    assert result["short"]["spread"].keys() >= set(RATES)
    assert "short: repetition 1 of 1" in done.stderr


@pytest.mark.grid
async def test_pipelinerls_pattern_carries_both_workloads_once_and_intact() -> None:
    """The peer that needs no packages of its own; `measure` raises where something came twice or damaged."""
    with scratch_folder() as folder:
        async with Stage(folder, Path(find_redis_server())) as stage:
            kind = peer.KINDS["pipelinerl_pattern"]
            pattern = await peer.Peer.start(stage, kind, None, num_workers=3)
            rows = [await pattern.measure(workload, count=8) for workload in ("short", "long")]
            await pattern.stop()
    assert all(row["trajectories_per_second"] > 0 for row in rows)


@pytest.mark.grid
def test_a_quick_run_of_the_ranker_compares_it_with_baseline_and_oracle() -> None:
    command = [sys.executable, "-m", "console", "bench", "ranker", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for data in ("made", "quickstart"):
        held_out = result[data]["held_out"]
        for forecaster in ("ridge", "prompt_length", "oracle"):
            for percent in (20, 10, 5):
                assert 0 <= held_out[forecaster][f"recall_longest_{percent}_percent"] <= 1
        assert 0 <= held_out["ridge"]["interval_coverage"] <= 1
        assert result[data]["doubled"]["recall_lost_ratio"] < result[data]["doubled"]["error_risen_ratio"]
        assert result[data]["prequential"]["ridge"]["num_samples"] > 0
        assert math.isfinite(result[data]["speed"]["call_1024_prompts_ms"])


@pytest.mark.grid
def test_a_quick_run_over_a_fleet_prints_ratios_and_times_as_json() -> None:
    command = [sys.executable, "-m", "console", "bench", "fleet", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    table = result["unlike_kv_limited"]
    assert table["random"] == 1.0
    assert 0 < table["streamrl_oracle"] < math.inf
    # The longest of 64 samples of 83 to 1,989 tokens takes at least 8.3 ms a token on the fastest of the GPUs.
    assert all(time_s > 1.0 for time_s in table["generation_s"].values())
    assert 0 <= result["ranker"]["recall_of_longest_20%"] <= 1


@pytest.mark.grid
def test_a_quick_run_of_the_weights_measures_every_way_they_travel() -> None:
    command = [sys.executable, "-m", "console", "bench", "weights", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["full"]["ratio_to_bare_download"] > 0
    assert result["full"]["by_size"]["10_mb"]["spread"].keys() >= {"mb_per_second", "bare_mb_per_second"}
    assert 0 < result["delta"]["bytes_ratio"] <= 0.05
    assert 1 <= result["link_copies"] < 1.01
    assert result["link"]["resent_ratio"] < 0.1
    assert result["swap_pause_ms"] > 0


@pytest.mark.grid
def test_scores_are_measured_until_the_broker_has_them() -> None:
    words = ["bench", "reward.scores", "--samples", "1024", "--repetitions", "1", "--json"]
    command = [sys.executable, "-m", "console", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["scores_per_second"] > 0
    assert result["cpu_ms_per_score"] > 0


@pytest.mark.grid
def test_programs_are_measured_in_every_shape_of_tests() -> None:
    words = ["bench", "reward.programs", "--programs", "4", "--repetitions", "1", "--json"]
    command = [sys.executable, "-m", "console", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    shapes = json.loads(done.stdout)["shapes"]
    assert shapes.keys() == {"input", "calls", "assertions"}
    assert all(each["programs_per_second"] > 0 and each["cpu_ms_per_program"] > 0 for each in shapes.values())
