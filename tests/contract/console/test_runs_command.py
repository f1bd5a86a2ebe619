"""`penstock runs`: list, show and delete, as a person and as a program sees them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from console.inspect.stored_runs import delete_command, list_command, show_command
from penstock.config import ConfigError
from penstock.v1 import broker_pb2
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RUN, RunningBroker, limits, serving
from tests.helpers.brokers.steps import train_step

NOWHERE = Path("no-such-folder")
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[")


@pytest.fixture
async def broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        owner = broker_pb2.RunOwner(instance_id="inst-1", owner_id="gpu-3")
        await running.call(
            "OpenRun", broker_pb2.OpenRunRequest(run_id=RUN, limits=limits(), owner=owner, takes_over=True)
        )
        await running.open(run_id="second")
        await train_step(running, "a", "b", run_id="second")
        yield running


async def output(command, capsys, *arguments, **options) -> str:
    assert await asyncio.to_thread(command, *arguments, runs_dir=NOWHERE, **options) == 0
    # The broker is in this process and logs to the same output.
    lines = capsys.readouterr().out.splitlines(keepends=True)
    return "".join(line for line in lines if not LOG_LINE.match(line))


async def test_runs_are_listed_shown_and_deleted(broker: RunningBroker, capsys) -> None:
    target = f"127.0.0.1:{broker.server.port}"
    await broker.call("CloseRun", broker_pb2.CloseRunRequest(run_id="second"))
    lines = (await output(list_command, capsys, broker=target, as_json=False)).splitlines()
    assert lines[1].split()[:3] == [RUN, "open", "0"]
    assert lines[1].split()[-1] == "inst-1"
    assert lines[2].split()[:3] == ["second", "closed", "1"]
    [first, second] = json.loads(await output(list_command, capsys, broker=target, as_json=True))
    assert (first["instance_id"], second["trained"], second["num_records"]) == ("inst-1", 4, 2)
    shown = await output(show_command, capsys, RUN, broker=target, as_json=False)
    for part in ("instance     inst-1", "trainer      gpu-3 (epoch 1", "groups_per_step 2", "audit "):
        assert part in shown
    document = json.loads(await output(show_command, capsys, "second", broker=target, as_json=True))
    assert (document["audit"]["trained"], document["limits"]["group_size"]) == (4, 2)
    assert "second: deleted" in await output(delete_command, capsys, "second", broker=target, is_forced=False)
    assert "nothing to delete" in await output(delete_command, capsys, "second", broker=target, is_forced=False)
    assert len(json.loads(await output(list_command, capsys, broker=target, as_json=True))) == 1


async def test_what_cannot_be_done_is_reported_in_one_line(broker: RunningBroker) -> None:
    target = f"127.0.0.1:{broker.server.port}"
    with pytest.raises(ConfigError, match="knows no run 'third'"):
        await asyncio.to_thread(show_command, "third", broker=target, runs_dir=NOWHERE, as_json=False)
    with pytest.raises(ConfigError, match=r"being worked on.*penstock runs delete run-1 --force"):
        await asyncio.to_thread(delete_command, RUN, broker=target, runs_dir=NOWHERE, is_forced=False)
    with pytest.raises(ConfigError, match="--broker"):
        await asyncio.to_thread(list_command, broker=None, runs_dir=NOWHERE, as_json=False)
