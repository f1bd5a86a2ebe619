"""The door for programs that are not part of Penstock: `penstock.clients`, and the four in examples/clients."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.clients import BrokerClient, Sample, make_group, make_prompt, samples_of, trajectories
from penstock.errors import OtherInstanceError, RefusedError, RunConflictError, UnknownSampleError
from penstock.security import NO_SECURITY, Security
from penstock.v1 import broker_pb2, types_pb2
from services.broker.records.store import Store
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RUN, Generator, RunningBroker, eventually, limits, serving
from tests.helpers.brokers.trajectories import group, groups
from tests.helpers.certificates import make_security
from tests.helpers.stores.stores import RedisServers, opened_store

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples" / "clients"
TIMEOUT_S = 30.0


async def start(name: str, broker: RunningBroker, security: Security = NO_SECURITY) -> asyncio.subprocess.Process:
    """One of the examples as a process, told two addresses of which the first answers nobody."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    if security.token is not None:
        files = {"CA": security.ca_file, "CERT": security.cert_file, "KEY": security.key_file}
        environment |= {f"PENSTOCK_TLS_{key}": str(file) for key, file in files.items()}
        environment["PENSTOCK_TOKEN"] = security.token
    arguments = [str(EXAMPLES / f"{name}.py"), f"127.0.0.1:1,127.0.0.1:{broker.server.port}", RUN]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment, stdout=pipe, stderr=pipe)


async def output(process: asyncio.subprocess.Process) -> list[str]:
    """What it wrote to stdout, once it ended well."""
    async with asyncio.timeout(TIMEOUT_S):
        stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    return stdout.decode().splitlines()


@pytest.mark.parametrize("kind", ["redis", "tls"])
async def test_one_example_puts_groups_another_trains_on_them_and_a_third_reads_the_run(
    kind: str, servers: RedisServers, tmp_path: Path
) -> None:
    is_redis = kind == "redis"
    security = NO_SECURITY if is_redis else make_security(tmp_path, token="a-secret-of-the-cluster")
    async with (
        opened_store("redis" if is_redis else "memory", servers) as store,
        serving(store, security=security) as broker,
    ):
        await broker.open(groups_per_step=8, max_staleness=8)
        follower = await start("follow_microbatches", broker, security)
        assert await output(await start("put_groups", broker, security)) == ["8 groups are stored"]

        async def is_trained() -> bool:
            return (await broker.audit()).trained == 16

        await eventually(is_trained)
        lines = await output(await start("read_run", broker, security))
        client = BrokerClient(broker.channel)
        version = (await client.get_run(RUN)).policy_version
        await client.close_run(RUN)
        assert lines[:2] == [
            f"version {version}, closed: False, generators: 0",
            "submitted 16, trained 16, in flight 0",
        ]
        stored = [f"task-{task} 0.0 1.0" for task in range(8)]
        assert sorted(line.partition(": ")[2] for line in lines[2:]) == stored
        assert await output(follower) == stored


async def test_an_example_submits_prompts_that_generators_answer() -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=8)
        assert await output(await start("submit_prompts", broker)) == ["8 prompts are submitted"]
        generator = Generator.connect(broker.channel)
        generator.beat(credits=16)
        leases = await generator.leases(16)
        assert {lease.key.group_id for lease in leases} == {f"row-{row}" for row in range(8)}
        # What the program did not say is the run's.
        assert {(lease.prompt.group_size, lease.prompt.sampling.max_new_tokens) for lease in leases} == {(2, 64)}


async def test_a_program_opens_a_run_and_no_other_one_by_that_name_with_other_limits() -> None:
    async with serving(MemoryStore()) as broker, BrokerClient(f"127.0.0.1:{broker.server.port}") as client:
        assert not (await client.open_run("own", limits=limits(), policy_version=0)).existed
        assert (await client.open_run("own", limits=limits(), policy_version=0)).existed
        with pytest.raises(RunConflictError):
            await client.open_run("own", limits=limits(group_size=3), policy_version=0)
        assert await client.list_runs() == ["own"]


async def test_others_read_and_feed_a_run_with_an_owner_and_do_not_consume_it() -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(owner=broker_pb2.RunOwner(instance_id="i", owner_id="its trainer"))
        client = BrokerClient(broker.channel)
        async with client.producer(RUN) as producer:
            await producer.put(made("g"))
        await client.submit(RUN, [make_prompt([1])])
        assert (await client.get_run(RUN)).audit.submitted == 4
        async with client.consumer(RUN, "c") as consumer:
            with pytest.raises(OtherInstanceError):
                await consumer.next(timeout_s=TIMEOUT_S)


def test_the_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lengths) == 4
    assert max(lengths.values()) < 20, lengths


def made(group_id: str, *, version: int = 0, num_samples: int = 2) -> types_pb2.TrajectoryGroup:
    samples = [
        Sample(token_ids=[7, 8], logprobs=[-0.5, -1.0], policy_version=version, reward=float(index))
        for index in range(num_samples)
    ]
    return make_group(make_prompt([1, 2, 3], group_id=group_id), samples)


async def test_puts_are_stored_together_and_flush_waits_for_them(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open(groups_per_step=3)
        async with BrokerClient(broker.channel).producer(RUN) as producer:
            # More at once than the run takes in one request.
            whole = await producer.put([made(f"g{number}") for number in range(2)])
            await producer.put(made("g2"))
            await producer.flush()
            books = await broker.audit()
            assert (books.submitted, books.in_flight) == (6, 6)
            assert (await whole).num_samples == 4


async def test_refusals_that_were_not_awaited_are_raised_by_flush_and_others_are_not(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open(groups_per_step=4)
        async with BrokerClient(broker.channel).producer(RUN) as producer:
            seen = await (await producer.put([made("a", version=7)]))
            assert [error.reason for error in seen.refused] == ["INVALID_FIELD"]
            await producer.put([made("b"), made("c", version=7)])
            await producer.put(made("d", num_samples=3))
            with pytest.raises(RefusedError, match="2 groups were refused, the first of them: group 'c'") as caught:
                await producer.flush()
            assert [refusal.split(": ")[0] for refusal in caught.value.refusals] == ["group 'c'", "group 'd'"]
            await producer.flush()
        assert (await broker.audit()).submitted == 2


async def test_a_program_that_never_flushes_hears_of_its_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "MAX_LEFT_PUTS", 2)
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=4)
        async with BrokerClient(broker.channel).producer(RUN) as producer:
            for name in "abc":
                await producer.put(made(name, version=7))
            with pytest.raises(RefusedError, match="3 groups were refused"):
                await producer.put(made("d"))
            await producer.put(made("d"))
        assert (await broker.audit()).submitted == 2


async def test_leaving_the_block_flushes(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open(groups_per_step=4)
        with pytest.raises(RefusedError):
            async with BrokerClient(broker.channel).producer(RUN) as producer:
                await producer.put([made("a"), made("b", version=7)])
        assert (await broker.audit()).submitted == 2


async def test_samples_come_back_as_they_were_put(store: Store) -> None:
    sample = Sample(
        token_ids=[5, 6, 7],
        logprobs=[-0.5, -1.5, -2.5],
        policy_version=[0, 0, 0],
        reward=0.25,
        loss_mask=[1, 0, 1],
        advantages=[0.5, 0.0, -0.5],
        is_truncated=True,
        text="abc",
    )
    async with serving(store) as broker:
        await broker.open()
        client = BrokerClient(broker.channel)
        async with client.producer(RUN) as producer, client.consumer(RUN, "c") as consumer:
            await producer.put(make_group(make_prompt([1], group_id="g"), [sample]))
            found = await consumer.next(timeout_s=TIMEOUT_S)
            assert found is not None
            [back] = samples_of(found.groups[0])
            for name in ("token_ids", "logprobs", "policy_version", "loss_mask", "advantages"):
                assert np.array_equal(getattr(back, name), getattr(sample, name)), name
            assert (back.reward, back.is_truncated) == (0.25, True)


async def test_what_a_message_states_stays_and_what_it_leaves_out_is_filled_in() -> None:
    stated = group("g")
    before = types_pb2.TrajectoryGroup.FromString(stated.SerializeToString())
    bare = types_pb2.TrajectoryGroup.FromString(stated.SerializeToString())
    bare.prompt.purpose, bare.prompt.group_size = types_pb2.PURPOSE_UNSPECIFIED, 0
    for trajectory in bare.trajectories:
        for name in ("key", "min_policy_version", "max_policy_version"):
            trajectory.ClearField(name)
        trajectory.score.ClearField("status")
    bare.ClearField("min_policy_version")
    wrong = types_pb2.TrajectoryGroup.FromString(stated.SerializeToString())
    wrong.prompt.group_id, wrong.min_policy_version = "wrong", 1
    for trajectory in wrong.trajectories:
        trajectory.key.group_id = "wrong"
    async with serving(MemoryStore()) as broker:
        await broker.open()
        async with BrokerClient(broker.channel).producer(RUN) as producer:
            await producer.put([stated, bare])
            [refusal] = (await producer.store([wrong])).refused
    assert (stated, bare) == (before, before)
    assert "min_policy_version: 1" in refusal.message


async def test_a_consumer_acknowledges_groups_and_versions_are_not_its_business(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open(groups_per_step=2, max_staleness=8)
        client = BrokerClient(broker.channel)
        async with (
            client.producer(RUN) as producer,
            client.consumer(RUN, "one", max_held_groups=1) as one,
            client.consumer(RUN, "two", max_held_groups=1) as two,
        ):
            await producer.put(groups("a", "b"))
            first, second = await one.next(timeout_s=TIMEOUT_S), await two.next(timeout_s=TIMEOUT_S)
            assert first is not None
            assert second is not None
            assert (await one.ack(first.groups)).policy_version == 1
            # The other one has not heard of that version.
            assert (await two.ack(second.groups)).policy_version == 2
            with pytest.raises(UnknownSampleError):
                await one.ack(groups("unknown"))
            assert one.held_group_ids == []
        assert (await broker.audit()).trained == 4


async def test_many_prompts_are_submitted_in_calls_that_fit_and_a_bad_one_is_named() -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(max_queued_groups=2000)
        client = BrokerClient(broker.channel)
        await client.submit(RUN, [make_prompt([1]) for _ in range(1500)])
        assert (await broker.audit()).submitted == 3000
        with pytest.raises(RefusedError, match="refused prompt bad"):
            await client.submit(RUN, [make_prompt([1]), make_prompt([-1], group_id="bad")])


def test_the_library_is_light_and_writes_nothing_to_stdout() -> None:
    program = """
import sys
from penstock.clients import BrokerClient
from penstock.process.logger import get_logger
heavy = {"torch", "transformers", "vllm", "redis", "ortools", "aiohttp", "services"} & set(sys.modules)
assert not heavy, heavy
get_logger().info("quiet")
get_logger().warning("away", peer="broker x")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "away peer='broker x'\n")


def test_every_module_of_the_library_logs_that_way() -> None:
    package = EXAMPLES.parents[1] / "penstock"
    own = {"log_setup.py", "logger.py"}
    others = [
        path for path in package.rglob("*.py") if path.name not in own and "structlog.get_logger" in path.read_text()
    ]
    assert others == []
