"""`penstock probe` for real on this machine, and the network between two machines over loopback."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import yaml

from console.probe.link_client import LinkClient, LinkError
from console.probe.link_server import Peer, serving_transfers
from console.probe.machine import measured_alone
from penstock.security import NO_SECURITY
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.code.sandboxes.sandbox import SandboxError
from tests.helpers.certificates import issue, make_authority
from tests.helpers.console import penstock, penstock_in_process, write_rows
from tests.helpers.full_disk import fill, small_disk
from tests.helpers.plans.probes import make_model

FLAGS = ("--prompts-per-step", "4", "--group-size", "4", "--staleness", "1")


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_machine_is_probed_and_planned_for(tmp_path: Path) -> None:
    # Other tests probe this machine, too, and one at a time may.
    with mock.patch.dict(os.environ, TMPDIR=str(tmp_path)):
        probed = penstock(
            *("probe", "--out", "inventory", "--name", "this", "--cpu-devices", "2", "--seconds", "0.05"),
            *("--skip", "decode", "--json"),
            cwd=tmp_path,
            timeout_s=200,
        )
    assert probed.returncode == 0, probed.stderr
    found = json.loads(probed.stdout)
    assert json.loads((tmp_path / "inventory" / "this.json").read_text()) == found
    assert found["accelerators"]["count"] == 2
    assert found["matrix_tflops_bf16"] > 0
    assert found["memory_GBps"] > 0
    assert found["allreduce"]["backend"] == "gloo"
    assert found["allreduce"]["bus_GBps"] > 0
    assert found["passes"]["forward_tflops"] > 0
    assert found["passes"]["forward_backward_tflops"] > 0
    assert found["disk"]["write_GBps"] > 0
    assert found["absent"] == {"decode": "left out by --skip"}
    assert "measuring the disk" in probed.stderr
    assert ("this machine is busy" in probed.stderr) is found["is_busy"]

    make_model(tmp_path / "model")
    row = {"run_id": "r", "policy_version": 1, "history": 0, "prompt_token_ids": [1] * 9, "token_ids": [2]}
    (tmp_path / "recording.jsonl").write_text(json.dumps(row) + "\n")
    sources = ("--inventory", "inventory", "--model", "model", "--data", "recording.jsonl")
    write_rows(tmp_path / "train.jsonl")
    run = {"run": {"num_steps": 1, "dir": "/runs"}, "model": {"path": "/model"}, "data": {"train": "/train.jsonl"}}
    run |= {"trainer": {"device": "cpu", "tokens_per_pack": 512}, "generator": {"engine": "transformers"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    deployed = ("--run", "run.yaml", "--deploy", "out", "--for", "slurm")
    planned = penstock_in_process("plan", *sources, *FLAGS, *deployed, "--budget-s", "2", "--json", cwd=tmp_path)
    assert planned.exit_code == 0, planned.output
    plan = json.loads(planned.stdout)
    assert plan["problem"] == "model"
    assert plan["rm1_plan"] == {
        "gen": [{"node": "this", "tp": 1, "count": 1, "batch": 32}],
        "train": [{"node": "this", "gpus": 1}],
        "broker": {"node": "this"},
        "scheduler": "this",
    }
    checked = yaml.safe_load((tmp_path / "out" / "default" / "machine-this.yaml").read_text())
    assert "gpu" not in checked, "no machine is looked at for GPUs that it was not probed to have"
    node = yaml.safe_load((tmp_path / "out" / "default" / "node-this.yaml").read_text())
    assert (node["gpu"], node["gpus"]) == (found["accelerators"]["kind"], 2)


@pytest.mark.timeout(240)
def test_a_machine_without_gpus_is_a_host_on_which_programs_of_a_reward_are_run(tmp_path: Path) -> None:
    try:
        find_sandbox("auto")
    except SandboxError as error:
        pytest.skip(str(error))
    program = "```python\nprint(int(input()) + 1)\n```"
    row = {"prompt": "Write a program that adds one.", "answer": program, "tests": [{"input": "1", "output": "2"}]}
    write_rows(tmp_path / "train.jsonl", row)
    run = {"run": {"num_steps": 1}, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
    run["reward"] = {"model": "code", "max_batch_size": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", TMPDIR=str(tmp_path)):
        probed = penstock(
            *("probe", "--name", "desk", "--seconds", "0.05", "--reward", "run.yaml", "--skip", "disk", "--json"),
            cwd=tmp_path,
            timeout_s=200,
        )
    assert probed.returncode == 0, probed.stderr
    found = json.loads(probed.stdout)
    assert (found["accelerators"], found["decode"], found["matrix_tflops_bf16"]) == (None, None, None)
    assert found["cores"] >= 1
    measured = found["reward"]
    assert (measured["model"], measured["completions"]) == ("code", "answers")
    # A process for each program: some milliseconds at best.
    assert 0.1 < measured["samples_per_second"] < 2000
    assert measured["memory_GB"] > 0


@asynccontextmanager
async def listening(security):
    peer = Peer(name="far-1", site="far")
    async with serving_transfers("127.0.0.1:0", peer, security=security) as url:
        yield url.rpartition("//")[2]


async def measured(target: str, security):
    return await asyncio.to_thread(LinkClient(target=target, security=security).measure, seconds=0.05)


async def test_a_link_is_measured_both_ways_over_tls_by_those_who_may(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "authority")
    server = issue(authority, name="far-1")
    async with listening(server) as target:
        found = await measured(target, issue(authority, name="near", roles=["generator"]))
        assert (found.machine, found.site) == ("far-1", "far")
        assert found.send_Gbps > 0
        assert found.receive_Gbps > 0
        assert 0 < found.round_trip_ms < 5000
        for caller, said in (
            (issue(authority, name="watcher", roles=["observer"]), "HTTP 403"),
            (issue(make_authority(tmp_path / "other"), name="stranger"), "certificate verify failed"),
            (NO_SECURITY, "start penstock probe --listen there"),
        ):
            with pytest.raises(LinkError, match=said):
                await measured(target, caller)


async def test_a_clock_that_makes_a_certificate_invalid_is_reported_with_the_fix(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "authority")
    caller = issue(authority, name="near", roles=["generator"])
    for name, ago, said in (("early", timedelta(days=-1), "not yet valid"), ("late", timedelta(days=9000), "expired")):
        async with listening(issue(authority, name=name, ago=ago)) as target:
            with pytest.raises(LinkError, match=rf"{said} by this machine's clock, 20.*; set the clock \(NTP\)"):
                await measured(target, caller)


async def test_targets_that_do_not_answer_are_reported_in_one_line(tmp_path: Path) -> None:
    server = replace(issue(make_authority(tmp_path / "authority")), cert_file=None, key_file=None, ca_file=None)
    async with listening(server) as target:
        pass
    with pytest.raises(LinkError, match=f"--with {target}: nothing listens there; start penstock probe --listen"):
        await measured(target, NO_SECURITY)


@pytest.mark.parametrize("place", ["out", "temporary"])
def test_a_full_disk_and_another_probe_are_reported_before_anything_is_measured(tmp_path: Path, place) -> None:
    with small_disk(2**20) as disk, mock.patch.object(tempfile, "tempdir", str(disk if place != "out" else tmp_path)):
        out = disk / "inventory" if place == "out" else tmp_path / "inventory"
        fill(disk)
        arguments = ("probe", "--name", "m", "--cpu-devices", "1", "--out", str(out), "--skip", "decode")
        refused = penstock_in_process(*arguments, cwd=tmp_path)
        assert refused.exit_code == 2, refused.output
        (line,) = (line for line in refused.stderr.splitlines() if line.startswith("penstock: "))
        assert "No space left on device; free some space, or name another folder" in line
        (disk / "filler").unlink()
        with measured_alone():
            refused = penstock_in_process(*arguments, cwd=tmp_path)
        assert refused.exit_code == 2, refused.output
        (line,) = refused.stderr.splitlines()
        assert f"another penstock probe measures this machine (process {os.getpid()}); wait until" in line
