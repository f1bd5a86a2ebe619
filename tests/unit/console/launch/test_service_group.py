"""Which services a run ends without, with real, tiny processes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from console.config.run_folder import RunFolder
from console.config.sections import LogSection
from console.launch import restarts
from console.launch.service_group import ServiceProcesses
from console.launch.supervisor import ProcessState, ServiceFailedError, ServiceSpec
from penstock.security import NO_SECURITY
from services.broker.config import BrokerConfig
from services.trainer.config import TrainerConfig
from tests.helpers.waiting import until

SLEEPS = "import time; time.sleep(60)"
FAILS = "raise SystemExit(1)"
MISTAKE = "print('engine: must be one of'); raise SystemExit(2)"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.create()
    return folder


def spec(folder: RunFolder, name: str, code: str, *, kind: str) -> ServiceSpec:
    async def is_ready() -> bool:
        return code == SLEEPS

    return ServiceSpec(
        name=name,
        kind=kind,
        argv=(sys.executable, "-S", "-c", code),
        address="",
        env={},
        log_path=folder.log_of(name),
        is_ready=is_ready,
    )


def make(folder: RunFolder, *, pauses: bool = True) -> ServiceProcesses:
    return ServiceProcesses(folder, security=NO_SECURITY, log=LogSection(), pauses=pauses)


async def test_a_generator_that_cannot_stay_up_leaves_the_run_going_and_is_tried_again(
    folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.2)
    services = make(folder)
    watcher = asyncio.create_task(services.watch())
    services.launch(spec(folder, "generator-0", SLEEPS, kind="generator"))
    services.launch(spec(folder, "generator-1", FAILS, kind="generator"))
    seen: list[str] = []
    await until(lambda: services.records.get("generator-1") is not None)
    await until(lambda: services.records["generator-1"].num_restarts >= restarts.MAX_FAILED_STARTS + 1, timeout_s=30)
    await until(lambda: services.records["generator-1"].state == ProcessState.PAUSED, timeout_s=30)
    seen.append(services.records["generator-1"].why)
    assert "ended with status 1" in seen[0]
    assert "next try" in seen[0]
    assert services.records["generator-0"].state == ProcessState.READY
    assert not watcher.done()
    watcher.cancel()
    await services.stop(services.names)


async def test_a_wrong_configuration_ends_the_run_with_the_last_of_its_kind_only(folder) -> None:
    services = make(folder)
    watcher = asyncio.create_task(services.watch())
    services.launch(spec(folder, "scheduler", MISTAKE, kind="scheduler"))
    services.launch(spec(folder, "generator-0", SLEEPS, kind="generator"))
    services.launch(spec(folder, "generator-1", MISTAKE, kind="generator"))
    await until(lambda: all(name in services.records for name in ("scheduler", "generator-1")))
    await until(
        lambda: {services.records[name].state for name in ("scheduler", "generator-1")} == {ProcessState.FAILED},
        timeout_s=30,
    )
    await asyncio.sleep(0)
    assert not watcher.done()
    services.launch(spec(folder, "reward", MISTAKE, kind="reward"))
    with pytest.raises(ServiceFailedError, match="reward ended with status 2: engine: must be one of"):
        await asyncio.wait_for(watcher, 30)
    await services.stop(services.names)


async def test_waiting_for_a_service_names_it_and_ends_if_it_does_not_come_up(folder) -> None:
    waited: list[str] = []
    services = ServiceProcesses(
        folder,
        security=NO_SECURITY,
        log=LogSection(),
        on_wait=lambda name, _problem, _waited_s: waited.append(name),
    )
    services.launch(spec(folder, "broker", FAILS, kind="broker"))
    with pytest.raises(ServiceFailedError, match="broker ended with status 1"):
        await services.wait_ready("broker", timeout_s=60)
    assert set(waited) == {"broker"}
    await services.stop(services.names)


def test_a_service_has_a_place_for_its_metrics_and_the_name_of_its_machine(
    folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = ServiceProcesses(folder, security=NO_SECURITY, log=LogSection(), machine="l4-0")
    started: list[ServiceSpec] = []
    monkeypatch.setattr(services, "launch", started.append)
    services.launch_service("broker", BrokerConfig(), name="broker", target="127.0.0.1:1")
    services.launch_service("broker", BrokerConfig(metrics_port=9), name="stated", target="127.0.0.1:1")
    services.launch_service("broker", BrokerConfig(metrics_listen="127.0.0.1:9"), name="same", target="127.0.0.1:1")
    services.launch_service("trainer", TrainerConfig(), name="rank-1", target="")
    own = services.metrics_address("broker")
    assert own.startswith("127.0.0.1:")
    assert [spec.metrics for spec in started] == [own, "127.0.0.1:9", "127.0.0.1:10", ""]
    for spec in started:
        stored = json.loads((folder.services / f"{spec.name}.yaml").read_text())
        assert (stored["metrics_listen"] or "", stored["metrics_port"]) == (spec.metrics, None)
    names = [spec.argv[spec.argv.index("--name") + 1] for spec in started]
    assert names == ["l4-0-broker", "l4-0-stated", "l4-0-same", "l4-0-rank-1"]
    services.kill()
