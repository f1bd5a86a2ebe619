"""The compose file on a real engine: three generators, secrets from files, every container killed, `down` and `up`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.console import ROOT
from tests.helpers.docker import reason_to_skip

NUM_STEPS = 100
STEP_S = 300.0
GENERATORS = ("generator_1", "generator_2", "generator_3")
RUN_SETTINGS = {
    "run.num_steps": NUM_STEPS,
    "run.num_eval_prompts": 8,
    "run.checkpoint_every_steps": 2,
    "algorithm.group_size": 4,
    "algorithm.prompts_per_step": 8,
    "sampling.max_new_tokens": 64,
    "optimizer.decay_steps": NUM_STEPS,
}


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.docker,
    pytest.mark.flaky(reruns=0),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]


class Deployment:
    """The services of the compose file, in a project of their own."""

    def __init__(self, folder: Path, override: dict[str, Any], environment: dict[str, str]) -> None:
        self.name = f"penstocktest{os.getpid()}"
        path = folder / "override.yml"
        path.write_text(yaml.safe_dump(override))
        files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(path))
        self._command = ("docker-compose", "-p", self.name, "--project-directory", str(ROOT), *files)
        self._environment = {**os.environ, **environment}

    def __call__(self, *arguments: str, timeout_s: float = 900.0) -> str:
        """Runs docker-compose; what it printed."""
        told = subprocess.run(
            (*self._command, *arguments),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    def up(self) -> None:
        """Starts what is not running."""
        self("up", "-d", "--scale", "generator=3", timeout_s=1800)

    def state(self, container: str) -> dict[str, Any]:
        """Docker's word on a container."""
        shown = subprocess.run(
            ("docker", "inspect", f"{self.name}_{container}"), capture_output=True, text=True, check=True
        )
        state: dict[str, Any] = json.loads(shown.stdout)[0]["State"]
        return state

    def step(self) -> int:
        """The newest step that was told."""
        steps = re.findall(rf"step (\d+)/{NUM_STEPS}", self("logs", "--no-color", "--tail", "200", "run"))
        return int(steps[-1]) if steps else 0

    def wait(self, what: str, condition: Callable[[], bool], *, timeout_s: float = STEP_S) -> None:
        """Until `condition` holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what} in {timeout_s:g} s:\n{self('logs', '--tail', '30')}"
            time.sleep(0.5)

    def wait_for_step_after(self, step: int) -> int:
        """Until another step is done; which."""
        self.wait(f"step after {step}", lambda: self.step() > step)
        return self.step()

    def crash(self, container: str) -> None:
        """kill -9 of its first process, as a crash does; returns when Docker has started it again."""
        pid = int(self.state(container)["Pid"])
        os.kill(pid, signal.SIGKILL)
        self.wait(
            f"restart of {container}",
            lambda: self.state(container)["Running"] and self.state(container)["Pid"] not in (0, pid),
        )


def _readable(folder: Path) -> Path:
    """Containers read it as users of their own."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "token").write_text("a token from a file\n")
    (folder / "redis").write_text('a "password" from a file\n')
    return _readable(folder)


@pytest.fixture
def deployment(warm_task: Any, tmp_path: Path, secrets: Path) -> Iterator[Deployment]:
    copied = _readable(Path(shutil.copytree(warm_task.model_dir.parent, tmp_path / "task")))
    model = f"{copied}:/data/quickstart/current:ro"
    settings = [f"{key}={value}" for key, value in RUN_SETTINGS.items()]
    generator = ["engine.engine=transformers", "engine.max_concurrent_samples=32"]
    override = {
        "services": {
            "prepare": {"entrypoint": ["true"]},
            "trainer": {"volumes": [model]},
            "reward": {"volumes": [model]},
            "generator": {
                "volumes": [model],
                "command": ["serve", "generator", "--config", "/config/generator.yaml", "run_id=c1", *generator],
            },
            "run": {"command": ["run", "/config/run.yaml", "run.id=c1", "--resume-or-start", *settings]},
        }
    }
    environment = {
        "PENSTOCK_RUN_ID": "c1",
        "PENSTOCK_SECRETS": str(secrets),
        "PENSTOCK_TOKEN_FILE": "/run/secrets/token",
        "PENSTOCK_REDIS_PASSWORD_FILE": "/run/secrets/redis",
    }
    found = Deployment(tmp_path, override, environment)
    found("build", "--quiet", timeout_s=3000)
    try:
        yield found
    finally:
        found("down", "--volumes", "--timeout", "20")


def test_every_container_may_be_killed_and_up_resumes_the_run(deployment: Deployment) -> None:
    deployment.up()
    step = deployment.wait_for_step_after(0)
    for container in ("broker_1", "redis_1", "scheduler_1", "reward_1", *GENERATORS, "run_1", "trainer_1"):
        deployment.crash(container)
        step = deployment.wait_for_step_after(step)

    metrics = (
        "from urllib.request import Request, urlopen; token = open('/run/secrets/token').read().strip(); "
        "asked = Request('http://trainer:9464/metrics', headers={'Authorization': f'Bearer {token}'}); "
        "print(urlopen(asked).read().decode())"
    )
    assert "penstock_trainer_steps_total" in deployment("exec", "-T", "broker", "python", "-c", metrics)
    assert "NOAUTH" in deployment("exec", "-T", "redis", "redis-cli", "ping")

    deployment("down")
    deployment.up()
    deployment.wait("the end of the run", lambda: deployment.state("run_1")["Status"] == "exited", timeout_s=1200)
    assert deployment.state("run_1")["ExitCode"] == 0, deployment("logs", "--no-color", "run")
    told = deployment("logs", "--no-color", "run")
    assert "resumes /runs/c1" in told
    assert "in flight 0: balanced" in told

    deployment.up()
    deployment.wait("the end of `up`", lambda: deployment.state("run_1")["Status"] == "exited")
    assert deployment.state("run_1")["ExitCode"] == 0
    assert "run c1 completed before" in deployment("logs", "--no-color", "run")
