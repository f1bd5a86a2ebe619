"""`penstock run` as a process: its configuration, its lines, its services' processes, its results."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from console.config.run_folder import RunFolder
from quickstart.prepare import Prepared
from tests.helpers.console import COMMAND, environment, penstock_in_process

RUN_ID = "e2e"


def small_run(task: Prepared, folder: Path, **settings: Any) -> dict[str, Any]:
    """Six short steps of 8 x 4 samples with the transformers engine; `section__key=value` changes a setting."""
    document: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "id": RUN_ID, "num_steps": 6, "num_eval_prompts": 8},
        "model": {"path": str(task.model_dir), "dtype": "float32"},
        "data": {"train": str(task.train_path), "eval": str(task.eval_path), "max_prompt_tokens": 128},
        "sampling": {"max_new_tokens": 64},
        "algorithm": {"group_size": 4, "prompts_per_step": 8, "max_staleness": 1},
        "optimizer": {"learning_rate": 1e-4},
        "generator": {"engine": "transformers", "max_concurrent_samples": 32},
        "reward": {"model": "exact_match"},
    }
    for name, value in settings.items():
        section, _, key = name.partition("__")
        document.setdefault(section, {})[key] = value
    return document


def leases_of(status: dict[str, Any], name: str) -> int:
    """How many samples the generator of that name holds, by `penstock status --json`."""
    views = status["generators"]
    return sum(view["num_leases"] for view in views if view["generator_id"].startswith(f"{name}-"))


def kill_with_leases(send: Callable[[int], None], num_leases: Callable[[], int]) -> None:
    """kill -9 of a generator by signals, while it holds leases: they stay as they are while it is stopped."""
    while True:
        send(signal.SIGCONT)
        if not num_leases():
            continue
        send(signal.SIGSTOP)
        if num_leases():
            return send(signal.SIGKILL)


class Run:
    """A `penstock` process and what it printed so far."""

    def __init__(self, process: subprocess.Popen[str], folder: RunFolder) -> None:
        self.process = process
        self.folder = folder
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def wait_for(
        self, what: str, condition: Callable[[], bool], *, timeout_s: float = 240.0, every_s: float = 0.05
    ) -> None:
        """Until `condition` holds; fails with the output when the run ends first or time is up."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s} s:\n{self.text}"
            time.sleep(every_s)

    def wait_for_step(self, step: int) -> None:
        """Until that step is done."""
        self.wait_for(f"step {step}", lambda: self.num_steps >= step)

    @property
    def num_steps(self) -> int:
        """Steps in metrics.jsonl."""
        metrics = self.folder.metrics
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def kill(self, service: str) -> None:
        """kill -9 of a service's process."""
        (record,) = [record for record in self.folder.records() if record.name == service]
        os.kill(record.pid, signal.SIGKILL)

    def kill_generator_with_leases(self, index: int) -> None:
        """kill -9 of a generator while it has samples in hand."""
        (record,) = [record for record in self.folder.records() if record.name == f"generator-{index}"]

        def num_leases() -> int:
            status = penstock_in_process("status", str(self.folder.path), "--json", cwd=self.folder.path)
            return leases_of(json.loads(status.stdout), f"gen-{index}")

        kill_with_leases(lambda number: os.kill(record.pid, number), num_leases)

    def num_restarts(self, service: str) -> int:
        """How often the launcher started it again."""
        return next(record.num_restarts for record in self.folder.records() if record.name == service)

    def end(self, *, timeout_s: float = 400.0) -> int:
        """Its exit status."""
        status = self.process.wait(timeout=timeout_s)
        self._reader.join(timeout=10)
        return status

    def summary(self) -> dict[str, Any]:
        """summary.json."""
        value: dict[str, Any] = json.loads(self.folder.summary.read_text())
        return value

    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl, one mapping a step."""
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]


@contextmanager
def penstock(*arguments: str, cwd: Path, run_dir: Path, **variables: str) -> Iterator[Run]:
    """The running command; killed at the end if it still runs, which takes its services with it."""
    process = subprocess.Popen(
        (*COMMAND, *arguments),
        cwd=cwd,
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Run(process, RunFolder(run_dir))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def running(document: Mapping[str, Any], folder: Path, **variables: str) -> Iterator[Run]:
    """`penstock run` of this configuration."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    with penstock("run", str(config), cwd=folder, run_dir=folder / "runs" / RUN_ID, **variables) as run:
        yield run


@contextmanager
def service(
    kind: str, settings: Mapping[str, Any], folder: Path, *, name: str = "", **variables: str
) -> Iterator[None]:
    """`penstock serve` of that kind; its log is NAME.log in `folder`, KIND.log without a name."""
    path = folder / f"{name or kind}.yaml"
    path.write_text(yaml.safe_dump(settings))
    with path.with_suffix(".log").open("wb") as log:
        command = (*COMMAND, "serve", kind, "--config", str(path))
        process = subprocess.Popen(command, cwd=folder, env=environment() | variables, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_for_listeners(addresses: Iterable[str]) -> None:
    """Until something listens at each."""
    deadline = time.monotonic() + 120
    for address in addresses:
        host, _, port = address.rpartition(":")
        while True:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                break
            assert time.monotonic() < deadline, f"nothing listens at {address}"
            time.sleep(0.1)


def assert_logs_are_json(logs: Path, service: str) -> None:
    """Every line of a service's log is an object that says when, how grave, who, and of which run."""
    lines = [json.loads(line) for path in logs.glob(f"{service}.log*") for line in path.read_text().splitlines()]
    assert lines
    for line in lines:
        assert {"timestamp", "level", "event"} <= line.keys(), line
        assert (line["service"], line["run_id"]) == (service, RUN_ID), line
        assert ("group_id" in line) or ("sample_index" not in line), line


def assert_balanced(summary: dict[str, Any], *, num_samples: int) -> None:
    """Every sample submitted was trained or dropped by name, and as many were trained as the steps hold."""
    audit = summary["audit"]
    assert audit["balanced"] is True
    assert audit["in_flight"] == 0
    assert audit["submitted"] == audit["trained"] + sum(audit["dropped"].values())
    assert audit["trained"] == num_samples


def assert_within_bound(run: Run, bound: int) -> None:
    """No sample was trained on beyond the staleness bound, in any step, and generation ran ahead where it may."""
    summary = run.summary()
    assert summary["max_staleness"] == bound
    assert summary["max_staleness_seen"] <= bound
    assert all(step["staleness/max"] <= bound for step in run.metrics())
    if bound > 0:
        assert summary["max_staleness_seen"] >= 1, "generation never ran ahead: the bound was not put to use"
