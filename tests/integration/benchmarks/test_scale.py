"""`penstock bench scale` prints every key that it promises, and refuses sizes that cannot be."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "console", "bench", "scale"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.grid
def test_a_quick_run_prints_every_key_as_json() -> None:
    done = subprocess.run([*COMMAND, "--quick", "--json"], capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["leases"]["8"]) >= {"us_per_lease", "max_stall_ms"}
    assert set(result["restart"]) >= {"first_call_s", "whole_s"}
    assert list(result["brokers"]) == ["1", "2"]
    for numbers in result["brokers"].values():
        assert numbers["num_commits"] > 0
        assert math.isfinite(numbers["us_per_token"])
        assert 0.0 <= numbers["conflict_ratio"] < 1.0
    for name in ("us_per_chunk", "us_per_token", "redis_bytes_per_token", "broker_mb", "heartbeat_late_max_s"):
        assert math.isfinite(result[name]), name
    assert result["redis_bytes_per_token"] > 4.0
    assert list(result["needs"]) == ["64", "256", "1024", "8192"]
    for numbers in result["needs"].values():
        assert set(numbers) >= {"broker_cores", "redis_nodes", "mb_per_s"}
    assert result["simulation"][0]["num_generators"] == 100
    assert "fleet: leasing 32 samples" in done.stderr


def test_samples_that_make_no_whole_groups_are_refused() -> None:
    command = [*COMMAND, "--generators", "3", "--samples", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 2
    assert "--generators 3 --samples 3: 9 samples make no whole groups of 8" in done.stderr
