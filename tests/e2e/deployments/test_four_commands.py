"""From nothing to a revised, encrypted run on four hosts of two sites: probe, plan, plan --deploy, and what it wrote.

Every machine is measured as it is, so trainer and generators are on CPUs, with a tiny model. Slurm's daemons, which
would start `machine.sh` on each machine, are shown in `test_slurm.py`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from console.config.run_folder import RunFolder
from tests.e2e.runs import Run
from tests.helpers.console import COMMAND, environment, penstock_in_process
from tests.helpers.plans.two_sites import make_data
from tests.helpers.sites.hosts import TwoSites, find_obstacle, two_sites

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.grid,
    pytest.mark.flaky(reruns=0),
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_obstacle() is not None, reason=f"hosts cannot be made here: {find_obstacle()}"),
]

RUN_ID, BOUND = "four", 2
DESK, TRAINER, GENERATORS = "desk", "train-0", ("gpu-0", "gpu-1")
SITES = {DESK: "a", TRAINER: "a", **dict.fromkeys(GENERATORS, "b")}
PROBE_PORT = 7309
GENERATOR = re.compile(r"generator in its place")


class Machines:
    """Hosts on which commands run, and the folder that the desk's person works in, which all of them see."""

    def __init__(self, folder: Path, sites: TwoSites, resources: ExitStack) -> None:
        self.folder, self._sites, self._resources = folder, sites, resources
        self.own = folder / "own"
        """What each host has for itself."""
        self.processes: list[subprocess.Popen[str]] = []
        self.command = folder / "bin" / "penstock"
        self.command.parent.mkdir()
        self.command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m console "$@"\n')
        self.command.chmod(0o755)

    def variables(self, host: str, *, has_certificate: bool = True) -> dict[str, str]:
        """Of a command on a host."""
        found = environment() | {"GRPC_DNS_RESOLVER": "native", "CUDA_VISIBLE_DEVICES": ""}
        # Other tests probe this machine, too.
        found["TMPDIR"] = str(self.folder)
        found["PATH"] = f"{self.command.parent}:{found['PATH']}"
        if has_certificate:
            files = self.folder / "certificates" / host
            found |= {f"PENSTOCK_TLS_{name.upper()}": str(files / f"{name}.pem") for name in ("ca", "cert", "key")}
        return found

    def run(self, host: str, *command: str, has_certificate: bool = True) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        variables = self.variables(host, has_certificate=has_certificate)
        where = ("env", "-C", str(self.folder), *command)
        return self._sites.hosts[host].run(*where, env=variables, timeout_s=200)

    def start(self, host: str, *command: str, **variables: str) -> Run:
        """A command that goes on; killed at the end, with all that it started."""
        process = self._sites.hosts[host].start(
            *command, env=self.variables(host) | variables, cwd=self.folder, log=subprocess.PIPE
        )
        self._resources.callback(process.wait, timeout=30)
        self._resources.callback(process.kill)
        self.processes.append(process)
        return Run(process, RunFolder(self._sites.hosts[TRAINER].own(self.own) / "runs" / RUN_ID))

    def close_outputs(self) -> None:
        """Of all that was started."""
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.close()

    def probe(self, host: str, *more: str) -> dict[str, Any]:
        """What a machine finds out about itself."""
        named = ("--name", host, "--site", SITES[host], "--seconds", "0.4", "--json")
        probed = self.run(host, *COMMAND, "probe", *named, "--skip", "decode", "--skip", "passes", *more)
        assert probed.returncode == 0, probed.stderr
        found: dict[str, Any] = json.loads(probed.stdout)
        return found


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """Four hosts with a certificate each that is good for measuring, and model and rows."""
    data = make_data(folder / "data")
    with ExitStack() as outputs, ExitStack() as resources:
        shape: dict[str, float] = {"bits_per_second": 200e6, "delay_s": 0.02}
        sites = two_sites((DESK, TRAINER), GENERATORS, folder=folder, folders=[folder / "own"], **shape)
        made = Machines(folder, resources.enter_context(sites), resources)
        # Only when nothing on any host can write any more.
        outputs.callback(made.close_outputs)
        for host in SITES:
            shutil.copytree(data, made._sites.hosts[host].own(made.own) / "data")
        assert penstock_in_process("certs", "init", "authority", cwd=folder).exit_code == 0
        for host in SITES:
            issue = ("certs", "issue", "generator", "--run", "*", "--site", "*", "--name", host, "--host", host)
            where = ("--dir", "authority", "--out", f"certificates/{host}")
            assert penstock_in_process(*issue, *where, cwd=folder).exit_code == 0
        yield made


def write_run(made: Machines) -> None:
    """The run, by paths of the machines; the reward takes time, so that the plan has to know how much."""
    document = {
        "run": {"id": RUN_ID, "dir": str(made.own / "runs"), "num_steps": 10_000},
        "model": {"path": str(made.own / "data" / "model"), "dtype": "float32"},
        "data": {"train": str(made.own / "data" / "train.jsonl"), "max_prompt_tokens": 32},
        "sampling": {"max_new_tokens": 16},
        "algorithm": {"group_size": 4, "prompts_per_step": 4, "max_staleness": BOUND},
        "reward": "math",
        "trainer": {"device": "cpu", "tokens_per_pack": 256},
        "generator": {"engine": "transformers", "max_concurrent_samples": 16},
        "scheduler": {"heartbeat_interval_s": 3},
    }
    (made.folder / "my.yaml").write_text(yaml.safe_dump(document))


def probe_all(made: Machines) -> None:
    """One after the other, and the link between the sites with the machine that listens."""
    listen = ("probe", "--listen", f"0.0.0.0:{PROBE_PORT}", "--name", TRAINER, "--site", "a")
    listener = made.start(TRAINER, *COMMAND, *listen)
    desk = made.probe(DESK)
    assert desk["accelerators"] is None
    trainer = made.probe(TRAINER, "--cpu-devices", "1", "--reward", "my.yaml")
    assert trainer["reward"]["model"] == "math"
    listener.wait_for("a listener", lambda: "answers at" in listener.text)
    first, second = GENERATORS
    (link,) = made.probe(first, "--cpu-devices", "1", "--with", f"{TRAINER}:{PROBE_PORT}")["links"]
    assert (link["machine"], link["site"]) == (TRAINER, "a")
    # The link has 200 Mbit/s and 40 ms; the pure Python that shapes it shares the cores with everything else.
    assert 0.01 < link["receive_Gbps"] < 0.25
    assert link["round_trip_ms"] > 35
    made.probe(second, "--cpu-devices", "1")
    listener.process.send_signal(signal.SIGTERM)
    assert listener.end(timeout_s=30) == 0


def plan_and_deploy(made: Machines) -> dict[str, Any]:
    """At the desk; the plan."""
    data = made.folder / "data"
    sources = ("--model", str(data / "model"), "--data", str(data / "train.jsonl"), "--completion-tokens", "16")
    planned = penstock_in_process(
        *("plan", "--inventory", "inventory", "--run", "my.yaml", *sources, "--budget-s", "3", "--json"),
        *("--deploy", "out", "--for", "slurm"),
        cwd=made.folder,
    )
    assert planned.exit_code == 0, planned.output
    plan: dict[str, Any] = json.loads(planned.stdout)["rm1_plan"]
    assert plan["broker"]["node"] == plan["scheduler"] == DESK
    assert {each["node"] for each in plan["gen"]} == set(GENERATORS)
    assert [each["node"] for each in plan["train"]] == [TRAINER]
    return plan


def follow_readme(made: Machines) -> None:
    """The certificates by the commands that were written, and the settings."""
    readme = (made.folder / "out" / "README.md").read_text()
    commands = re.findall(r"^penstock certs issue .*\n.*", readme, re.MULTILINE)
    assert len(commands) == len(SITES)
    script = "\n".join(("set -e", *commands))
    issued = subprocess.run(
        ["sh", "-c", script], cwd=made.folder, env=made.variables(DESK), capture_output=True, text=True, check=False
    )
    assert issued.returncode == 0, issued.stderr
    settings = f"export PENSTOCK_SECRETS={shlex.quote(str(made.folder / 'certificates'))}\n"
    (made.folder / "out" / "settings.env").write_text(settings)


def placed(pattern: re.Pattern[str], folder: Path) -> int:
    """How many processes below a folder said where they stand."""
    return sum(len(pattern.findall(log.read_text())) for log in folder.rglob("*.log"))


def generating(plan: dict[str, Any]) -> set[str]:
    """The machines of a plan that generate."""
    return {each["node_id"] for each in plan["assignments"] if each["role"] == "ROLE_GENERATOR"}


def plans(run: Run) -> list[dict[str, Any]]:
    """All that were in force, in order."""
    return [json.loads(line) for line in run.folder.plans.read_text().splitlines()]


def test_probe_plan_deploy_and_start_give_an_encrypted_run_that_is_revised(tmp_path: Path) -> None:
    with machines(tmp_path) as made:
        write_run(made)
        probe_all(made)
        plan_and_deploy(made)
        follow_readme(made)
        out = made.folder / "out"

        def on_all(what: str) -> dict[str, Run]:
            script = (str(out / "machine.sh"), what)
            return {host: made.start(host, *script, SLURMD_NODENAME=host) for host in (DESK, *GENERATORS, TRAINER)}

        for host, checked in on_all("check").items():
            assert checked.end(timeout_s=200) == 0, f"{host}: {checked.text}"
        started = on_all("start")
        run = started[TRAINER]
        run.wait_for_step(2)
        assert generating(plans(run)[0]) == set(GENERATORS)
        assert [placed(GENERATOR, out / "b" / "runs" / host) for host in GENERATORS] == [1, 1]
        centre = {log.stem for log in (out / "a" / "runs" / DESK / "logs").iterdir()}
        assert centre == {"redis", "broker", "scheduler"}
        assert {log.stem for log in run.folder.log_of("trainer").parent.iterdir()} == {"trainer", "reward"}
        # Nobody without a certificate is answered.
        asked = [
            made.run(TRAINER, *COMMAND, "audit", RUN_ID, "--broker", f"{DESK}:7301", has_certificate=has)
            for has in (False, True)
        ]
        assert asked[0].returncode != 0
        assert "balanced" not in asked[0].stdout
        assert "balanced" in asked[1].stdout, asked[1].stderr

        started[GENERATORS[1]].process.send_signal(signal.SIGTERM)
        run.wait_for("a revision", lambda: generating(plans(run)[-1]) == {GENERATORS[0]})
        assert f"{GENERATORS[1]} of the plan in force: not there any more" in plans(run)[-1]["explanation"]
        run.wait_for_step(run.num_steps + 2)
        # What the trainer reached has flowed back.
        run.wait_for("measured rates", lambda: "of the speed that the cost model expects" in run.text)
        run.process.send_signal(signal.SIGTERM)
        run.end(timeout_s=120)
        summary = run.summary()
    assert summary["audit"]["balanced"] is True
    assert summary["audit"]["trained"] == summary["steps"] * 16
    assert summary["max_staleness_seen"] <= BOUND
