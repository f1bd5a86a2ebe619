"""Sessions over hosts of their own under mutual TLS: an environment here, generators behind a link, one of them killed.

Real processes, each host with the certificate of its role alone, as docs/environments.md says.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from console.config.run_folder import RunFolder
from quickstart.prepare import Prepared
from tests.e2e.runs import RUN_ID, Run, assert_balanced, kill_with_leases, leases_of, small_run
from tests.helpers.console import COMMAND, ROOT, environment, penstock_in_process, write_rows
from tests.helpers.sites.hosts import TwoSites, find_obstacle, two_sites

pytestmark = [pytest.mark.e2e, pytest.mark.flaky(reruns=0), pytest.mark.timeout(600)]

NUM_STEPS = 4
ROLES = {"control": "operator", "broker": "broker", "train": "trainer", "env": "environment"}
NEAR, FAR = (*ROLES, "score"), ("gpu-0", "gpu-1")
CHECK = ("env", "check", "env:7320", "--row", '{"answer": "42"}', "--say", "50", "--say", "42")
SLOW = """
import time
import played

class Guess(played.Guess):
    def step(self, action):
        time.sleep(0.5)
        return super().step(action)
"""
"""Sessions take longer than training, so that a generator that is killed has some."""


class Hosts:
    """The hosts, each with a certificate, and what runs on them."""

    def __init__(self, folder: Path, sites: TwoSites, resources: ExitStack) -> None:
        self.sites, self.local = sites, folder / "local"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._folder, self._resources = folder, resources

    def path(self, host: str, name: str) -> Path:
        """A file in what a host has for itself, seen from outside."""
        return self.sites.hosts[host].own(self.local / name)

    def certify(self, host: str, role: str, *, run: str = RUN_ID) -> None:
        where = ("--dir", str(self._folder / "authority"), "--out", str(self.path(host, "tls")))
        names = ("--run", run, "--site", "*", "--name", host, "--host", host)
        made = penstock_in_process("certs", "issue", role, *names, *where, cwd=self._folder)
        assert made.exit_code == 0, made.output

    def launch(self, host: str, *command: str, log: IO[str] | int) -> subprocess.Popen[str]:
        return self.sites.hosts[host].start(*command, env=self._env(host), cwd=self.local, log=log)

    def serve(self, host: str, kind: str, settings: dict[str, Any]) -> None:
        """`penstock serve` of that kind; killed at the end."""
        self.path(host, "service.yaml").write_text(yaml.safe_dump(settings))
        self.start(host, *COMMAND, "serve", kind, "--config", str(self.local / "service.yaml"))

    def start(self, host: str, *command: str) -> None:
        log = self._resources.enter_context((self._folder / f"{host}.log").open("a"))
        process = self.processes[host] = self.launch(host, *command, log=log)
        self._resources.callback(process.wait)
        self._resources.callback(process.kill)

    def penstock(self, host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command on a host, to its end."""
        return self.sites.hosts[host].run(*COMMAND, *arguments, env=self._env(host), timeout_s=120)

    def wait_for_listeners(self, *addresses: str) -> None:
        problem = self.sites.hosts["control"].wait_for_listeners(*addresses, env=self._env("control"))
        assert not problem, problem + self.logs()

    def logs(self) -> str:
        """The end of every log."""
        return "".join(f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in self._folder.glob("*.log"))

    def _env(self, host: str) -> dict[str, str]:
        files = {"CA": "ca.pem", "CERT": "cert.pem", "KEY": "key.pem"}
        # An environment is a third party's: it has none of the cluster's credentials, and is shown none.
        prefixes = ("PENSTOCK_JUDGE",) if host == "env" else ("PENSTOCK", "PENSTOCK_JUDGE")
        tls = {
            f"{each}_TLS_{name}": str(self.local / "tls" / file) for each in prefixes for name, file in files.items()
        }
        return environment() | tls | {"XDG_CACHE_HOME": str(self.local / "cache")}


@pytest.fixture(scope="session")
def possible() -> None:
    """Skips the test, before anything is prepared for it, where there can be no hosts."""
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(f"hosts cannot be made here: {obstacle}")


@pytest.fixture
def hosts(possible: None, task: Prepared, tmp_path: Path) -> Iterator[Hosts]:
    """Broker, trainer, environment and generators, each on a host of its own; no run yet."""
    with ExitStack() as resources:
        shape: dict[str, Any] = {"bits_per_second": 200e6, "delay_s": 0.02}
        sites = two_sites(NEAR, FAR, folder=tmp_path, folders=[tmp_path / "local"], **shape)
        made = Hosts(tmp_path, resources.enter_context(sites), resources)
        assert penstock_in_process("certs", "init", "authority", cwd=tmp_path).exit_code == 0
        for host, role in ROLES.items():
            made.certify(host, role, run="*" if role in ("operator", "broker") else RUN_ID)
        made.certify("score", "reward")
        broker = {"listen": "0.0.0.0:7301", "advertise": "broker:7301", "redis_url": "memory://"}
        made.serve("broker", "broker", broker)
        made.path("train", "runs").mkdir()
        trainer = {
            "listen": "0.0.0.0:7304",
            "weights_listen": "0.0.0.0:7305",
            "weights_url": "train:7305",
            "state_dir": None,
            "allowed_roots": [str(made.local), str(task.model_dir.parent)],
        }
        made.serve("train", "trainer", trainer)
        shutil.copy(ROOT / "examples" / "environment_python" / "guess.py", made.path("env", "played.py"))
        made.path("env", "guess.py").write_text(SLOW)
        made.start("env", *COMMAND, "env", "serve", "guess:Guess", "--listen", "0.0.0.0:7320")
        for host in FAR:
            made.certify(host, "generator")
            made.serve(host, "generator", generator(made, task, host))
        made.wait_for_listeners("broker:7301", "train:7304", "env:7320")
        yield made


def generator(hosts: Hosts, task: Prepared, host: str) -> dict[str, Any]:
    return {
        "listen": "127.0.0.1:7302",
        "generator_id": host,
        "run_id": RUN_ID,
        "broker": "broker:7301",
        "weights": "train:7304",
        "model_path": str(task.model_dir),
        "dtype": "float32",
        "cache_dir": str(hosts.local / "cache"),
        "environment": {"target": "grpc://env:7320"},
        "engine": {"engine": "transformers", "max_concurrent_samples": 16, "num_threads": 1},
    }


@contextmanager
def running(hosts: Hosts, task: Prepared) -> Iterator[Run]:
    """`penstock run` on `control`, attached to what runs already."""
    numbers = ({"prompt": "a1 b2=", "answer": str(number)} for number in range(3, 90))
    rows = write_rows(hosts.path("train", "rows.jsonl"), *numbers)
    document = small_run(
        task, hosts.local, run__num_steps=NUM_STEPS, run__num_eval_prompts=0, data__eval=None,
        data__train=str(hosts.local / rows.name), sampling__max_new_tokens=100, endpoints__broker="broker:7301",
        endpoints__trainer="train:7304", endpoints__generators=[],
    )  # fmt: skip
    shutil.copy(rows, hosts.path("control", rows.name))
    document |= {"environment": {"target": "grpc://env:7320"}, "record": True}
    hosts.path("control", "run.yaml").write_text(yaml.safe_dump(document))
    process = hosts.launch("control", *COMMAND, "run", str(hosts.local / "run.yaml"), log=subprocess.PIPE)
    try:
        yield Run(process, RunFolder(hosts.path("train", "runs") / RUN_ID))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()


def assert_roles_are_kept_apart(hosts: Hosts) -> None:
    """The environment plays with generators of its run alone, and says whom it refuses."""
    wrong_role = hosts.penstock("score", *CHECK, "--run", RUN_ID)
    assert wrong_role.returncode == 1
    assert f"Reset is not open to score, reward of run {RUN_ID}; it is to: environment, generator" in wrong_role.stdout
    hosts.certify("score", "generator", run="another")
    # In the name of the run that the certificate is of; the environment is everyone's who shows one of its authority.
    assert hosts.penstock("score", *CHECK).returncode == 0


def num_leases(hosts: Hosts, host: str) -> int:
    """How many samples a host's generator holds, by the broker's books."""
    status = hosts.penstock("control", "status", RUN_ID, "--broker", "broker:7301", "--json")
    assert status.returncode == 0, status.stdout + status.stderr
    return leases_of(json.loads(status.stdout), host)


def test_sessions_over_hosts_outlive_a_generator_under_certificates_of_their_roles(
    hosts: Hosts, task: Prepared
) -> None:
    with running(hosts, task) as run:
        run.wait_for_step(1)
        kill_with_leases(hosts.processes["gpu-0"].send_signal, lambda: num_leases(hosts, "gpu-0"))
        assert_roles_are_kept_apart(hosts)
        assert run.end() == 0, run.text + hosts.logs()
    assert_balanced(run.summary(), num_samples=NUM_STEPS * 8 * 4)
    assert run.summary()["audit"]["dropped"] == {}
    lines = [
        json.loads(line) for line in hosts.path("control", f"runs/{RUN_ID}/trajectories.jsonl").read_text().splitlines()
    ]
    assert len(lines) == NUM_STEPS * 8 * 4
    assert {line["score"]["model"] for line in lines} == {"guess"}
    assert any(len(line["score"]["turn_values"]) > 1 for line in lines)
    # Sessions of the killed one were gone on with by the other, on another host.
    assert {line["generator_id"].rpartition("-")[0] for line in lines} == {*FAR}
    assert any(line["num_leases"] > 1 for line in lines)
    assert "in plain text" not in hosts.logs() + run.text
