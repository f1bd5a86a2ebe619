"""Routes of samples: what is refused, and that what is accepted is delivered."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from penstock.wire.routes import RoutingShape
from services.broker.assembly.messages import trajectory
from services.broker.ingest.trajectory_decoder import read_put
from services.broker.ingest.validation import check_routing
from services.broker.operations import append_trajectories, submission
from services.broker.operations.leasing import Grant
from services.broker.records.stored_sample import compacted, read_sample
from services.broker.rules.limits import Limits
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import evaluation, limits, prompt
from tests.unit.broker.builders import lease, open_state, put, submit

SHAPE = RoutingShape(num_layers=2, num_experts=8, experts_per_token=2)
ABORTED, STOP = types_pb2.FINISH_REASON_ABORTED, types_pb2.FINISH_REASON_STOP


def rows(first: int, count: int) -> bytes:
    """Rows of consecutive positions, each recognisable."""
    return b"".join(bytes([position % 8, 1, 2, 3]) for position in range(first, first + count))


def routed(**changes: Any) -> RunState:
    return open_state(routing=SHAPE.to_proto(), **changes)


def stored(state: RunState) -> list[bytes]:
    """The payloads that the state's last operations store of sample a/0."""
    return [payload for sample, payload in state.pending.chunks if sample == ("a", 0)]


def begun() -> tuple[RunState, Grant]:
    state = routed()
    assert submit(state, "a") == []
    return state, lease(state, 1)[0]


def test_routes_survive_chunks_another_generator_and_compaction() -> None:
    state, grant = begun()
    # A prompt of three tokens: rows of its first two positions come with the first tokens.
    assert put(state, grant, [5, 6], routes=rows(0, 4)) == []
    assert put(state, grant, [], offset=2, finish=ABORTED, text="") == []
    [other] = lease(state, 1)
    assert (other.sample, other.num_prefix_tokens) == (grant.sample, 2)
    assert put(state, other, [7], offset=2, finish=STOP, routes=rows(4, 1)) == []
    sample = read_sample(stored(state))
    assert sample.routes == rows(0, 5)
    assert read_sample([compacted(sample)]) == sample
    assert trajectory(state.groups["a"], 0, sample).routes == rows(0, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "routes: 0 bytes; 4 rows of 4 bytes are 16"),
        ({"routes": rows(0, 2)}, "routes: 8 bytes; 4 rows"),
        ({"routes": rows(0, 3) + bytes([8, 0, 0, 0])}, "routes: expert 8; ids are below 8"),
    ],
)
def test_a_chunk_with_bad_routes_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    state, grant = begun()
    [error] = put(state, grant, [5, 6], **changes)
    assert (error.reason, error.next_offset) == ("INVALID_FIELD", 0)
    assert error.message.startswith(message)
    assert put(state, grant, [5, 6], routes=rows(0, 4)) == []


def test_a_chunk_with_unrequested_routes_is_refused() -> None:
    state = open_state()
    submit(state, "a")
    [error] = put(state, lease(state, 1)[0], [5], routes=rows(0, 3))
    assert error.message == "routes: 12 bytes; this sample comes without"


def test_an_evaluated_sample_comes_without_routes() -> None:
    state = routed()
    assert submission.submit(state, [evaluation("e")], retired=(), now_s=1.0) == []
    assert put(state, lease(state, 1)[0], [5]) == []


def test_without_routes_nothing_is_stored_for_them() -> None:
    state = open_state()
    submit(state, "a")
    [grant] = lease(state, 1)
    assert put(state, grant, [5, 6]) == []
    [payload] = stored(state)
    names = {field.name for field, _ in types_pb2.TokenChunk.FromString(payload).ListFields()}
    assert names == {"token_ids", "logprobs", "policy_versions"}
    assert not state.run.limits.HasField("routing")


def put_group(routes: bytes, **changes: Any) -> types_pb2.TrajectoryGroups:
    key = types_pb2.SampleKey(group_id="g")
    sample = types_pb2.Trajectory(
        key=key,
        token_ids=int32_bytes([5, 6]),
        behavior_logprobs=float32_bytes([-0.5, -0.5]),
        policy_versions=encode_versions([0, 0]),
        finish_reason=STOP,
        score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0),
        routes=routes,
        **changes,
    )
    return types_pb2.TrajectoryGroups(groups=[types_pb2.TrajectoryGroup(prompt=prompt("g"), trajectories=[sample])])


@pytest.mark.parametrize(
    ("is_asked", "routes", "message"),
    [
        (True, rows(0, 4), ""),
        (True, rows(0, 3), "routes: 12 bytes; 4 rows"),
        (True, b"\x09" * 16, "routes: expert 9"),
        (False, b"", ""),
        (False, rows(0, 4), "routes: 16 bytes; this sample comes without"),
    ],
)
def test_groups_that_are_put_come_with_routes_where_they_are_asked_for(
    is_asked: bool, routes: bytes, message: str
) -> None:
    state = routed() if is_asked else open_state()
    packed = put_group(routes).SerializeToString()
    request = append_trajectories.Put(payload_id="p", payload=packed, groups=read_put(packed))
    errors = append_trajectories.put(state, request, 1.0).errors
    assert [error.message for error in errors] == ([] if not message else [errors[0].message])
    assert all(message in error.message for error in errors)
    if not message:
        assert state.pending.payloads["p"] == packed


def test_routes_lower_the_tokens_of_a_group_and_of_a_prompt() -> None:
    wide = types_pb2.RoutingShape(num_layers=48, num_experts=128, experts_per_token=8)
    with pytest.raises(InvalidFieldError, match=r"limits.group_size: .* with routes of 384 bytes a token"):
        Limits.from_proto(limits(group_size=64, max_completion_tokens=1 << 15, routing=wide))
    state = open_state(routing=wide)
    [error] = submit(state, "a", token_ids=bytes(4 * 30_000))
    assert error.message.startswith("token_ids: 30000; must be at most 21845 tokens in a run whose routes take 384")


@pytest.mark.parametrize(
    ("asked", "recorded", "message"),
    [
        (SHAPE, SHAPE, ""),
        (None, None, ""),
        (SHAPE, None, "hello.routing: unset, but the run replays routes .* engine 'emulated' records none"),
        (None, SHAPE, "hello.routing: .*must be unset in a run without algorithm.routing_replay"),
        (SHAPE, RoutingShape(num_layers=3, num_experts=8, experts_per_token=2), "hello.routing: .*num_layers=3"),
    ],
)
def test_a_generator_records_what_the_run_asks_for(
    asked: RoutingShape | None, recorded: RoutingShape | None, message: str
) -> None:
    hello = broker_pb2.GeneratorHello(engine="emulated", routing=None if recorded is None else recorded.to_proto())
    bounds = Limits.from_proto(limits(routing=None if asked is None else asked.to_proto()))
    if not message:
        check_routing(hello, bounds)
        return
    with pytest.raises(InvalidFieldError, match=message):
        check_routing(hello, bounds)
