"""Two sites on hosts of their own: a trainer on two machines here, generators there, a slow link that breaks between.

Real processes with mutual TLS, started as docs/two_sites.md says. Nobody connects into the far site, its clocks are
wrong, and no two hosts share a disk: model, data and checkpoints are on a server that speaks S3. PENSTOCK_LINK_CUT_S:
for how long the link is cut, seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from console.config.run_folder import RunFolder
from quickstart.prepare import Prepared
from tests.e2e.runs import RUN_ID, Run, assert_balanced, assert_within_bound, small_run
from tests.helpers.console import COMMAND, environment, penstock_in_process
from tests.helpers.sites.hosts import Host, TwoSites, find_obstacle, two_sites
from tests.helpers.stores.redis_server import find_redis_server
from tests.soak.skewed import set_offset

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.flaky(reruns=0), pytest.mark.timeout(600)]

CUT_S = float(os.environ.get("PENSTOCK_LINK_CUT_S", "12"))
NUM_STEPS, BOUND = 16, 2
CLOCK_OFF_S = 30.0
BEGUN_BYTES = 200_000
"""Of a version, when it is certainly on its way."""
RATE_BITS_PER_S, ONE_WAY_S = 200e6, 0.02
NEAR, FAR = ("control", "train-0", "train-1"), ("gpu-0", "gpu-1")
WEIGHTS_PORT, RELAY_PORT, METRICS_PORT = 7305, 7307, 9464
BUCKET = "s3://team"
S3_SETTINGS = {
    "AWS_ENDPOINT_URL": "http://control:9000",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "train-0:29400", "--rdzv-id", RUN_ID, "--max-restarts", "3")
GRACE = ("--shutdown-timeout", "305")
SCRAPE = """
import os, ssl, urllib.request
tls = ssl.create_default_context(cafile=os.environ["PENSTOCK_TLS_CA"])
tls.load_cert_chain(os.environ["PENSTOCK_TLS_CERT"], os.environ["PENSTOCK_TLS_KEY"])
print(urllib.request.urlopen("https://localhost:9464/metrics", context=tls, timeout=20).read().decode())
"""


class Fleet:
    """The services of both sites, each started on its host by `serve`, and the run's console on `control`."""

    def __init__(self, task: Prepared, folder: Path, sites: TwoSites, resources: ExitStack) -> None:
        self.sites = sites
        self.local = folder / "local"
        """What each host has for itself."""
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._folder = folder
        self._resources = resources
        self.task = task
        for name in FAR:
            shutil.copytree(task.model_dir, self.path(name, "model"))

    def path(self, host: str, name: str) -> Path:
        """A file in what a host has for itself, seen from outside."""
        return self._host(host).own(self.local / name)

    def certify(self, host: str, *roles: str, name: str, run: str = RUN_ID, site: str = "*") -> None:
        """Issue the certificate of a host, into its own folder `tls`."""
        where = ("--dir", str(self._folder / "authority"), "--out", str(self.path(host, "tls")))
        names = ("--run", run, "--site", site, "--name", name, "--host", host)
        made = penstock_in_process("certs", "issue", *roles, *names, *where, cwd=self._folder)
        assert made.exit_code == 0, made.output

    def launch(self, host: str, *command: str, log: IO[str] | int) -> subprocess.Popen[str]:
        """A running command of a host, which knows its certificate."""
        return self._host(host).start(*command, env=self._env(), cwd=self.local, log=log)

    def start(self, host: str, name: str, *command: str) -> None:
        """Start a command on a host; it is killed at the end."""
        log = self._resources.enter_context((self._folder / f"{name}.log").open("a"))
        process = self.processes[name] = self.launch(host, *command, log=log)
        self._resources.callback(process.wait)
        self._resources.callback(process.kill)

    def serve(
        self, host: str, kind: str, settings: dict[str, Any], *, name: str = "", by: tuple[str, ...] = ()
    ) -> None:
        """`penstock serve` of that kind on a host."""
        path = self.path(host, f"{kind}.yaml")
        path.write_text(yaml.safe_dump(settings))
        command = (*(by or COMMAND), "serve", kind, "--config", str(self.local / path.name))
        self.start(host, name or host, *command)

    def penstock(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command on `control`, to its end."""
        return self._host("control").run(*COMMAND, *arguments, env=self._env(), timeout_s=120)

    def wait_for_listeners(self, *addresses: str) -> None:
        """Until something listens at each, seen from `control`."""
        problem = self._host("control").wait_for_listeners(*addresses, env=self._env())
        assert not problem, problem + self.logs()

    def fetched_bytes(self, host: str) -> dict[str, int]:
        """Bytes of weights that a generator has got so far, by source."""
        scraped = self._host(host).run(sys.executable, "-c", SCRAPE, env=self._env())
        assert scraped.returncode == 0, scraped.stderr
        found = (line.split() for line in scraped.stdout.splitlines() if line.startswith("penstock_generator_fetched"))
        return {name.split('"')[1]: int(float(value)) for name, value in found if "_total" in name}

    def weights_over_link(self) -> dict[str, int]:
        """Bytes that the trainer's weights server sent over the link so far, by receiving host."""
        counts = self.sites.link.inbound_bytes
        return {name: counts[self._host(name).address, WEIGHTS_PORT] for name in FAR}

    def most_taken(self, *hosts: str) -> int:
        """Bytes of weights that the one of these generators has got which got most, from wherever; 0 if none runs."""
        return max(sum(self.fetched_bytes(host).values()) for host in hosts)

    def installed(self) -> set[int]:
        """Versions that a generator of the far site has installed so far."""
        logs = "".join((self._folder / f"{host}.log").read_text() for host in FAR)
        return {int(version) for version in re.findall(r"weights installed .*?policy_version=(\d+)", logs)}

    def num_starts(self, host: str) -> int:
        """How often a generator has started its engine."""
        return (self._folder / f"{host}.log").read_text().count("engine started")

    def can_connect(self, source: str, target: str, port: int) -> bool:
        """Whether one host can connect to another's port."""
        connect = f"import socket; socket.create_connection(({target!r}, {port}), timeout=2)"
        return self._host(source).run(sys.executable, "-c", connect, env=self._env()).returncode == 0

    def stored_files(self, prefix: str) -> set[str]:
        """The files below a name in the bucket, as another machine lists them."""
        listing = f"from penstock.storage.storage import Storage; print(*Storage('{BUCKET}/{prefix}').list())"
        listed = self._host("train-1").run(sys.executable, "-c", listing, env=self._env())
        assert listed.returncode == 0, listed.stderr
        return set(listed.stdout.split())

    def logs(self) -> str:
        """The end of every log."""
        return "".join(f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in self._folder.glob("*.log"))

    def _host(self, name: str) -> Host:
        return self.sites.hosts[name]

    def _env(self) -> dict[str, str]:
        files = {"CA": "ca.pem", "CERT": "cert.pem", "KEY": "key.pem"}
        tls = {f"PENSTOCK_TLS_{name}": str(self.local / "tls" / file) for name, file in files.items()}
        return environment() | tls | S3_SETTINGS | {"XDG_CACHE_HOME": str(self.local / "cache")}


@pytest.fixture(scope="session")
def possible() -> None:
    """Skips the test, before anything is prepared for it, where there can be no sites."""
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(f"two sites cannot be made here: {obstacle}")


@pytest.fixture
def fleet(possible: None, task: Prepared, tmp_path: Path) -> Iterator[Fleet]:
    """Two sites whose services run; no run yet."""
    with ExitStack() as resources:
        shape = {"bits_per_second": RATE_BITS_PER_S, "delay_s": ONE_WAY_S}
        sites = two_sites(NEAR, FAR, folder=tmp_path, folders=[tmp_path / "local"], **shape)
        made = Fleet(task, tmp_path, resources.enter_context(sites), resources)
        assert penstock_in_process("certs", "init", "authority", cwd=tmp_path).exit_code == 0
        made.certify("control", "operator", name="control", run="*")
        _start_near_site(made)
        for host in FAR:
            made.certify(host, "generator", "observer", name=host, site="b")
            set_offset(made.path(host, "clock"), CLOCK_OFF_S)
            start_generator(made, host)
        made.wait_for_listeners("control:7301", "train-0:7304")
        yield made


def _start_near_site(fleet: Fleet) -> None:
    _start_object_storage(fleet)
    redis = (find_redis_server(), "--bind", "127.0.0.1", "--port", "6379", "--save", "", "--dir", str(fleet.local))
    fleet.start("control", "redis", *redis)
    broker = {"listen": "0.0.0.0:7301", "advertise": "control:7301", "redis_url": "redis://127.0.0.1:6379/0"}
    fleet.serve("control", "broker", broker | {"scheduler": "127.0.0.1:7306"}, name="broker")
    trainer = {
        "listen": "0.0.0.0:7304",
        "weights_listen": f"0.0.0.0:{WEIGHTS_PORT}",
        "weights_url": f"train-0:{WEIGHTS_PORT}",
        "trusts_network": True,
        "state_dir": None,
        "allowed_roots": [str(fleet.local)],
        "allowed_storage": [BUCKET],
    }
    for host in ("train-0", "train-1"):
        fleet.path(host, "runs").mkdir()
        fleet.certify(host, "trainer", name=host)
        fleet.serve(host, "trainer", trainer, by=(*TORCHRUN, *RENDEZVOUS, *GRACE, "-m", "console"))


def _start_object_storage(fleet: Fleet) -> None:
    """On `control`, with model and rows."""
    for path in (fleet.task.model_dir, fleet.task.train_path, fleet.task.eval_path):
        target = fleet.path("control", "stored") / path.name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
    served = (sys.executable, "-P", "-m", "tests.helpers.stores.object_storage")
    fleet.start("control", "s3", *served, "0.0.0.0", "9000", BUCKET, str(fleet.local / "stored"))
    fleet.wait_for_listeners("control:9000")


def start_generator(fleet: Fleet, host: str) -> None:
    """On a host whose wall clock is wrong."""
    settings = {
        "listen": "127.0.0.1:7302",
        "relay_listen": f"0.0.0.0:{RELAY_PORT}",
        "metrics_port": METRICS_PORT,
        "generator_id": host,
        "site": "b",
        "run_id": RUN_ID,
        "broker": "control:7301",
        "weights": "train-0:7304",
        "model_path": str(fleet.local / "model"),
        "dtype": "float32",
        "cache_dir": str(fleet.local / "cache"),
        "engine": {"engine": "transformers", "max_concurrent_samples": 16, "num_threads": 1},
    }
    skewed = (sys.executable, "-P", "-m", "tests.soak.skewed", str(fleet.local / "clock"))
    fleet.serve(host, "generator", settings, by=skewed)


@contextmanager
def running(fleet: Fleet, task: Prepared, folder: Path) -> Iterator[Run]:
    """`penstock run` on `control`, attached to what runs already."""
    document = small_run(
        task, folder, run__num_steps=NUM_STEPS, run__dir=str(fleet.local / "runs"),
        run__checkpoint_storage=f"{BUCKET}/runs", run__checkpoint_every_steps=5,
        model__path=f"{BUCKET}/{task.model_dir.name}", data__train=f"{BUCKET}/{task.train_path.name}",
        data__eval=f"{BUCKET}/{task.eval_path.name}", algorithm__max_staleness=BOUND, sampling__max_new_tokens=32,
        endpoints__broker="control:7301", endpoints__trainer="train-0:7304", endpoints__generators=[],
        listen__scheduler="127.0.0.1:7306", trainer__processes=2,
    )  # fmt: skip
    fleet.path("control", "run.yaml").write_text(yaml.safe_dump(document))
    process = fleet.launch("control", *COMMAND, "run", str(fleet.local / "run.yaml"), log=subprocess.PIPE)
    try:
        yield Run(process, RunFolder(fleet.path("train-0", "runs") / RUN_ID))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()


def kill_the_relay(fleet: Fleet, run: Run) -> str:
    """kill -9 of the generator that fetches over the link, while it does; returns its host."""
    before, found = fleet.weights_over_link(), ""

    def is_fetching() -> bool:
        nonlocal found
        grown = {name: count - before[name] for name, count in fleet.weights_over_link().items()}
        found = max(grown, key=lambda name: grown[name])
        return grown[found] > BEGUN_BYTES

    run.wait_for("a fetch over the link", is_fetching, every_s=0.002)
    fleet.processes[found].send_signal(signal.SIGKILL)
    return found


def test_a_run_over_two_sites_survives_its_link_its_relay_and_a_wrong_clock(
    fleet: Fleet, task: Prepared, tmp_path: Path
) -> None:
    link = fleet.sites.link
    with running(fleet, task, tmp_path) as run:
        run.wait_for_step(4)
        over_link, installed = sum(fleet.weights_over_link().values()), fleet.installed()
        # A busy generator skips versions, and not those that the other one skips. One may be on the way.
        one_version = (task.model_dir / "model.safetensors").stat().st_size
        assert 0 < over_link < 1.1 * one_version * (len(installed) + 1)

        killed = kill_the_relay(fleet, run)
        run.wait_for_step(run.num_steps + 2)
        start_generator(fleet, killed)

        link.is_cut = True
        heals_s = time.monotonic() + CUT_S
        run.wait_for("the end of the cut", lambda: time.monotonic() > heals_s and fleet.num_starts(killed) == 2)
        assert run.num_steps <= NUM_STEPS - 4
        status = fleet.penstock("status", RUN_ID, "--broker", "control:7301")
        link.is_cut = False
        run.wait_for("the killed one at work again", lambda: fleet.most_taken(killed) > 0)

        assert "no generator is connected" in status.stdout
        first_step, before, over_link = run.num_steps, fleet.installed(), sum(fleet.weights_over_link().values())
        assert first_step <= NUM_STEPS - 3
        assert run.end() == 0, run.text + fleet.logs()
        num_new, over_link = len(fleet.installed() - before), sum(fleet.weights_over_link().values()) - over_link
        print(f"since step {first_step}: {over_link:,} bytes over the link for {num_new} versions of {one_version:,}")
        assert 0 < over_link < 1.1 * one_version * (num_new + 1)

    assert_balanced(run.summary(), num_samples=NUM_STEPS * 8 * 4)
    assert_within_bound(run, BOUND)
    # The second machine's part of each checkpoint has gone from its own disk to the storage.
    stored = fleet.stored_files(f"runs/{RUN_ID}/step_{NUM_STEPS}")
    assert {"MANIFEST.json", "resume/shard-00001.safetensors", "resume/shard-00002.safetensors"} <= stored
    assert [*fleet.path("train-0", "runs").glob("*/checkpoints/step_*")] == []
    audit = fleet.penstock("audit", RUN_ID, "--broker", "control:7301")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    # Nobody tried to connect into the far site, where somebody listens; whoever does is refused.
    assert link.refused == set()
    assert fleet.can_connect("gpu-0", "gpu-1", RELAY_PORT)
    assert not fleet.can_connect("control", "gpu-1", RELAY_PORT)
    assert link.refused == {(fleet.sites.hosts["gpu-1"].address, RELAY_PORT)}
