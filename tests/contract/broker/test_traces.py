"""A group's trace: one from its submission to the step that trained it, where it was sampled, failed or was slow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import grpc

from console.config.run_folder import RunFolder
from console.page.run_data import RunData
from penstock import tracing
from penstock.network.rpc import call
from penstock.tracing.tail import MAX_TAIL
from penstock.v1 import broker_pb2, types_pb2
from services.broker.ingest.score_check import DROP_REASONS
from services.broker.operations import drops
from services.broker.records.ended import Ended
from services.broker.records.store import Store
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.storage.memory_store import MemoryStore
from services.broker.traces.lives import Lives
from tests.helpers.brokers.broker import RUN, Generator, Trainer, Worker, prompt, result, serving
from tests.helpers.traces import Read, spans_in, tracing_to

PARTS = ["rl.sample.queue", "rl.sample.score", "rl.sample.wait_for_training"]


def tree(spans: list[Read], group_id: str) -> dict[str, list[Read]]:
    """The spans of a group's trace by name; checks that each but the root has its parent among them."""
    trace_id = f"{tracing.group_context(RUN, group_id).trace_id:032x}"
    members = [each for each in spans if each.span["traceId"] == trace_id]
    ids = {each.span["spanId"] for each in members}
    roots = [each.name for each in members if each.span.get("parentSpanId") not in ids]
    assert roots == (["rl.group"] if members else [])
    found: dict[str, list[Read]] = {}
    for each in members:
        assert int(each.span["startTimeUnixNano"]) <= int(each.span["endTimeUnixNano"])
        found.setdefault(each.name, []).append(each)
    return found


async def test_a_sampled_group_is_one_trace_through_the_store(store: Store, tmp_path: Path) -> None:
    with tracing_to(tmp_path, ratio=1.0):
        async with serving(store) as broker:
            await broker.open()
            caller = tracing.group_context("a client", "its span")
            with tracing.within(caller):
                request = broker_pb2.SubmitPromptsRequest(run_id=RUN)
                request.prompts.add().CopyFrom(prompt("g1", group_size=2))
                request.prompts.add().CopyFrom(prompt("g2", group_size=2, traceparent="whatever a client writes"))
                await call(broker.stub.SubmitPrompts, request, peer="broker")
            generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
            generator.beat(credits=4)
            leases = await generator.leases(4)
            root = tracing.group_context(RUN, "g1")
            # What generators, reward workers and the trainer get is what the store kept with the prompt.
            kept = {lease.prompt.group_id: lease.prompt.traceparent for lease in leases}
            assert kept == {"g1": root.traceparent, "g2": tracing.group_context(RUN, "g2").traceparent}
            await generator.finish(leases)
            scoring = await worker.leases(4)
            assert {lease.item.key.group_id: lease.traceparent for lease in scoring} == kept
            await worker.report(*(result(lease) for lease in scoring))
            trainer = Trainer.connect(broker.channel)
            groups = await trainer.groups(2)
            assert {group.prompt.group_id: group.prompt.traceparent for group in groups} == kept
            await trainer.ack(["g1", "g2"], 1)
    spans = spans_in(tmp_path)
    found = tree(spans, "g1")
    # The generators write their leases themselves.
    assert {name: len(each) for name, each in found.items()} == {"rl.group": 1, "rl.sample": 2} | dict.fromkeys(
        PARTS, 2
    )
    step = tracing.step_context(RUN, 1, 0)
    assert found["rl.group"][0].links == [f"{step.span_id:016x}"]
    own = {f"{tracing.sample_context(root, index, 0).span_id:016x}" for index in range(2)}
    assert {each.span["spanId"] for each in found["rl.sample"]} == own
    assert {each.span["parentSpanId"] for name in PARTS for each in found[name]} == own
    for name in ("rl.sample", *PARTS):
        assert sorted(each.attributes["rl.sample.key"] for each in found[name]) == ["g1/0", "g1/1"]
    (submit,) = [each for each in spans if each.name == "rl.submit"]
    assert (submit.span["traceId"], submit.span["parentSpanId"]) == (
        f"{caller.trace_id:032x}",
        f"{caller.span_id:016x}",
    )
    assert len(submit.links) == 2


async def test_what_is_not_sampled_leaves_no_trace_unless_it_failed(tmp_path: Path) -> None:
    with tracing_to(tmp_path, ratio=0.0):
        async with serving(MemoryStore()) as broker:
            policy = broker_pb2.RunPolicy(partial_groups=broker_pb2.PARTIAL_GROUP_POLICY_SHRINK)
            await broker.open(policy=policy, group_size=3)
            given = tracing.group_context(RUN, "x").traceparent
            response = await broker.submit(prompt("fine", group_size=1), prompt("bad", group_size=3, traceparent=given))
            assert not response.errors
            generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
            generator.beat(credits=4)
            leases = await generator.leases(4)
            assert [lease.prompt.traceparent for lease in leases] == [""] * 4
            await generator.finish(leases)
            fine, failing, *others = await worker.leases(4)
            failed = result(failing, None, types_pb2.SCORE_STATUS_FAILED)
            await worker.report(failed, *(result(lease) for lease in (fine, *others)))
            trainer = Trainer.connect(broker.channel)
            await trainer.groups(2)
            await trainer.ack(["fine", "bad"], 1)
    spans = spans_in(tmp_path)
    assert tree(spans, "fine") == {}
    found = tree(spans, "bad")
    # Its generator wrote nothing, so the broker writes the last lease from the times that it kept.
    assert {name: len(each) for name, each in found.items()} == {
        "rl.group": 1,
        "rl.sample": 3,
        "rl.sample.queue": 3,
        "rl.sample.generate": 3,
        "rl.sample.score": 2,
        "rl.sample.wait_for_training": 2,
    }
    errors = Counter(each.span.get("status", {}).get("message") for each in found["rl.sample"])
    assert errors == {None: 2, "reward_failed": 1}
    (lane,) = RunData(RunFolder(tmp_path)).answer("lanes", {"sample": f"bad/{others[0].item.key.sample_index}"})[
        "lanes"
    ]
    assert [span[2] for span in lane["spans"]] == ["queued", "leased", "scoring", "waiting"]


async def test_every_status_that_is_a_failure_leaves_a_trace(tmp_path: Path) -> None:
    reasons = list(DROP_REASONS.values())
    size = len(reasons) + 2
    with tracing_to(tmp_path, ratio=0.0):
        async with serving(MemoryStore()) as broker:
            policy = broker_pb2.RunPolicy(partial_groups=broker_pb2.PARTIAL_GROUP_POLICY_SHRINK)
            await broker.open(policy=policy, group_size=size)
            await broker.submit(prompt("g", group_size=size))
            generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
            generator.beat(credits=size)
            await generator.finish(await generator.leases(size))
            leases = sorted(await worker.leases(size), key=lambda each: each.item.key.sample_index)
            statuses = [*DROP_REASONS, *[types_pb2.SCORE_STATUS_OK] * 2]
            values = [*[None] * len(reasons), 0.0, 1.0]
            await worker.report(*(map(result, leases, values, statuses)))
            assert (await broker.audit()).in_flight == 2
    samples = [each for each in spans_in(tmp_path) if each.name == "rl.sample"]
    found = {each.attributes["rl.sample.key"]: each.span["status"]["message"] for each in samples}
    # To abstain is no failure.
    assert found == {f"g/{index}": why for index, why in enumerate(reasons) if why != "reward_abstained"}
    assert len(found) >= 6


async def test_a_scorer_is_a_station_of_its_own(tmp_path: Path) -> None:
    with tracing_to(tmp_path, ratio=1.0):
        async with serving(MemoryStore()) as broker:
            await broker.open(policy=broker_pb2.RunPolicy(needs_reference_logprobs=True))
            await broker.submit(prompt("g", group_size=1))
            generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
            generator.beat(credits=1)
            leases = await generator.leases(1)
            await generator.finish(leases)
            await worker.score(1)
            scorer = Worker.connect(broker.channel, "scorer-1", task=broker_pb2.SCORING_TASK_REFERENCE_LOGPROBS)
            [lease] = await scorer.leases(1)
            assert lease.traceparent == tracing.group_context(RUN, "g").traceparent
            nothing = bytes(len(lease.item.token_ids))
            await scorer.report(
                broker_pb2.ScoreResult(lease_id=lease.lease_id, key=lease.item.key, reference_logprobs=nothing)
            )
            trainer = Trainer.connect(broker.channel)
            await trainer.groups(1)
            await trainer.ack(["g"], 1)
    found = tree(spans_in(tmp_path), "g")
    parts = ("score", "reference", "wait_for_training")
    [score], [reference], [waited] = (found[f"rl.sample.{part}"] for part in parts)
    name = {"rl.sample.key": "g/0"}
    assert (score.attributes, reference.attributes) == (name, {**name, "rl.worker.id": "scorer-1"})
    assert score.span["endTimeUnixNano"] == reference.span["startTimeUnixNano"]
    assert reference.span["endTimeUnixNano"] == waited.span["startTimeUnixNano"]


async def test_a_bad_traceparent_of_a_peer_changes_nothing(tmp_path: Path) -> None:
    with tracing_to(tmp_path, ratio=1.0):
        async with serving(MemoryStore()) as broker:
            await broker.open()
            request = broker_pb2.SubmitPromptsRequest(run_id=RUN, prompts=[prompt("g")])
            for sent in ("", "00-zz", "x" * 4000):
                metadata = grpc.aio.Metadata(("traceparent", sent))
                response = await broker.stub.SubmitPrompts(request, metadata=metadata)
                assert not response.errors
    assert all("parentSpanId" not in each.span for each in spans_in(tmp_path))


def test_slow_samples_are_traced_and_a_broken_grader_fills_no_disk(tmp_path: Path) -> None:
    def group(name: str, took_s: float) -> GroupRecord:
        times = {"first_lease_s": 2.0, "lease_s": 2.0, "finish_s": 2.0 + took_s, "score_s": 2.5 + took_s}
        return GroupRecord(group_id=name, submit_s=1.0, trained_version=1, samples=[SampleRecord(**times)])

    with tracing_to(tmp_path, ratio=0.0):
        lives = Lives(RUN)
        usual = [Ended(group=group(f"g{n}", 1.0 + n % 3)) for n in range(200)]
        lives.record([*usual, Ended(group=group("slow", 30.0)), *usual], history=0, now_s=50.0)
        bad = GroupRecord(group_id="bad", submit_s=1.0)
        failures = [
            Ended(group=bad, reason=drops.TOO_MANY_LEASES, is_failure=True, index=n, sample=SampleRecord(lease_s=2.0))
            for n in range(3000)
        ]
        lives.record(failures, history=0, now_s=50.0)
    spans = spans_in(tmp_path)
    keys = [each.attributes["rl.sample.key"] for each in spans if each.name == "rl.sample"]
    assert keys[0] == "slow/0"
    assert len(keys) == MAX_TAIL
