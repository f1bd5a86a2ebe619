"""`penstock bench size --quick`: the whole run that is measured at a real size, here with a tiny model."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks.size.__main__ import main

pytestmark = [pytest.mark.grid, pytest.mark.e2e, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]
WITH_A_MODEL = {"trainer", "trainer-1", "generator-0", "engine"}


def test_a_run_is_measured_from_load_to_swap(capsys):
    assert main(["--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["processes"].keys() == WITH_A_MODEL
    assert all(each["peak_mb"] > 50 for each in found["processes"].values())
    assert {"broker", "redis", "reward", "scheduler", "console"} <= found["other_peaks_mb"].keys()
    for name in ("load_s", "step_s", "swap_s", "offer_s", "offer_ratio", "logits_extra_gb", "published_bytes"):
        assert found[name] > 0, name
    assert 0 <= found["publish_pause_share"] < 1
    assert found["long_sample_tokens"] == 64
    if shutil.which("ss"):
        # Every generator fetches the first version whole.
        assert found["link_bytes"]["trainer to generator-0"] > found["published_bytes"]
        assert found["link_bytes"]["trainer to trainer-1"] > 0
