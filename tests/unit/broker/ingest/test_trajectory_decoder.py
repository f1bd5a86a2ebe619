"""What a producer sends, checked before anything is stored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, group_slices, int32_bytes, packed_parts
from services.broker.ingest import put_messages, token_arrays
from services.broker.ingest.trajectory_decoder import read_put
from tests.helpers.brokers.trajectories import group, groups, pack_groups

Group = types_pb2.TrajectoryGroup


@pytest.mark.usefixtures("_small_and_large_arrays")
def test_facts_of_a_request_are_read() -> None:
    made = [group("a", num_tokens=5), group("b", num_samples=1, version=3)]
    made[0].trajectories[1].policy_versions.CopyFrom(encode_versions([7, 7, 2, 2, 9]))
    made[0].trajectories[1].min_policy_version = 2
    made[0].trajectories[1].max_policy_version = 9
    packed = b"".join(packed_parts(made))
    assert packed == pack_groups(made)
    found = read_put(packed)
    one, two = found
    assert (one.group_id, one.fault, found.num_prompt_tokens[0]) == ("a", "", 3)
    assert (one.sample_tokens, one.min_versions, one.max_versions) == ([5, 5], [0, 2], [0, 9])
    assert (two.sample_tokens, two.min_versions, two.rewards) == ([3], [3], [0.0])
    assert found.slices == group_slices(packed)


@pytest.fixture(params=["joined", "apart", "unparsed"])
def _small_and_large_arrays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays are looked at one by one, and those of long samples not parsed; here all of them are such."""
    if request.param != "joined":
        monkeypatch.setattr(token_arrays, "LARGE_BYTES", 1)
    if request.param == "unparsed":
        monkeypatch.setattr(put_messages, "LONG_BYTES", 1)


@pytest.mark.usefixtures("_small_and_large_arrays")
def test_a_sample_without_tokens_is_as_old_as_it_says() -> None:
    made = group("a", version=4)
    empty = made.trajectories[0]
    for field in ("token_ids", "behavior_logprobs", "policy_versions"):
        empty.ClearField(field)
    (found,) = read_put(pack_groups([made]))
    assert (found.fault, found.sample_tokens, found.min_versions) == ("", [0, 3], [4, 4])


def _set(field: str, value: object) -> Callable[[Group], None]:
    def spoil(made: Group) -> None:
        setattr(made.trajectories[1], field, value)

    return spoil


def _reorder(made: Group) -> None:
    made.trajectories[0].key.sample_index = 1


def _rename(made: Group) -> None:
    made.trajectories[0].key.group_id = "other"


def _runs(*versions: int) -> Callable[[Group], None]:
    return lambda made: made.trajectories[1].policy_versions.CopyFrom(encode_versions(versions))


def _score(status: types_pb2.ScoreStatus.ValueType, value: float | None) -> Callable[[Group], None]:
    return lambda made: made.trajectories[1].score.CopyFrom(types_pb2.Score(status=status, value=value))


OK = types_pb2.SCORE_STATUS_OK
FAULTS: dict[str, tuple[Callable[[Group], None], str]] = {
    "no trajectories": (lambda made: made.ClearField("trajectories"), "trajectories"),
    "no group id": (lambda made: made.prompt.ClearField("group_id"), "group_id"),
    "evaluation": (lambda made: setattr(made.prompt, "purpose", types_pb2.PURPOSE_EVALUATE), "prompt.purpose"),
    "no prompt": (lambda made: made.prompt.ClearField("token_ids"), "prompt.token_ids"),
    "odd prompt": (lambda made: setattr(made.prompt, "token_ids", b"12345"), "prompt.token_ids"),
    "negative prompt": (lambda made: setattr(made.prompt, "token_ids", int32_bytes([-1])), "prompt.token_ids"),
    "cut by mass": (lambda made: setattr(made.prompt.sampling, "top_p", 0.9), "prompt.sampling.top_p"),
    "cut by rank": (lambda made: setattr(made.prompt.sampling, "top_k", 9), "prompt.sampling.top_k"),
    "greedy": (lambda made: setattr(made.prompt.sampling, "temperature", 0.0), "prompt.sampling.temperature"),
    "large metadata": (lambda made: setattr(made.prompt, "metadata_json", "x" * 70_000), "prompt.metadata_json"),
    "foreign sample": (_rename, "key.group_id"),
    "order": (_reorder, "key.sample_index"),
    "odd tokens": (_set("token_ids", b"12345"), "token_ids"),
    "negative tokens": (_set("token_ids", int32_bytes([1, -2, 3])), "token_ids"),
    "few logprobs": (_set("behavior_logprobs", float32_bytes([-1.0])), "behavior_logprobs"),
    "nan logprob": (_set("behavior_logprobs", float32_bytes([-1.0, np.nan, -1.0])), "behavior_logprobs"),
    "infinite logprob": (_set("behavior_logprobs", float32_bytes([-1.0, -np.inf, -1.0])), "behavior_logprobs"),
    "positive logprob": (_set("behavior_logprobs", float32_bytes([-1.0, 0.5, -1.0])), "behavior_logprobs"),
    "few advantages": (_set("advantages", float32_bytes([1.0])), "advantages"),
    "nan advantage": (_set("advantages", float32_bytes([1.0, np.nan, 1.0])), "advantages"),
    "infinite advantage": (_set("advantages", float32_bytes([1.0, np.inf, 1.0])), "advantages"),
    "short mask": (_set("loss_mask", b"\1"), "loss_mask"),
    "strange mask": (_set("loss_mask", b"\1\2\1"), "loss_mask"),
    "unfinished": (_set("finish_reason", types_pb2.FINISH_REASON_ABORTED), "finish_reason"),
    "no score": (_score(types_pb2.SCORE_STATUS_FAILED, None), "score"),
    "no value": (_score(OK, None), "score"),
    "nan score": (_score(OK, float("nan")), "score"),
    "score beyond float32": (_score(OK, 1e300), "score"),
    "no versions": (lambda made: made.trajectories[1].ClearField("policy_versions"), "policy_versions"),
    "few versions": (_runs(0, 0), "policy_versions"),
    "negative version": (_runs(0, -1, 0), "policy_versions"),
    "other versions": (_runs(1, 1, 1), "min_policy_version"),
    "wrong newest": (_set("max_policy_version", 5), "max_policy_version"),
    "wrong group version": (lambda made: setattr(made, "min_policy_version", 3), "min_policy_version"),
}


@pytest.mark.usefixtures("_small_and_large_arrays")
@pytest.mark.parametrize("name", FAULTS)
def test_a_malformed_group_is_named_and_its_neighbours_are_not_hurt(name: str) -> None:
    spoil, field = FAULTS[name]
    made = groups("a", "b", "c")
    spoil(made[1])
    found = read_put(pack_groups(made))
    assert [bool(fault) for fault in found.faults] == [False, True, False]
    assert found.faults[1].startswith(field)
    assert [one.sample_tokens for one in found] == [[3, 3], [], [3, 3]]


@pytest.mark.parametrize(
    "packed",
    [b"", b"\x0a", b"\x0a\x05abc", b"\x12\x01a", b"\x0a\xff\xff\xff\xff\xff\xff", b"\x0a\x02\x0a\x7f", bytes(5 << 20)],
    ids=["nothing", "no length", "cut", "foreign field", "endless length", "bad group", "too large"],
)
def test_bytes_that_are_no_groups_are_refused_whole(packed: bytes) -> None:
    with pytest.raises(InvalidFieldError, match="groups"):
        read_put(packed)


def test_too_many_groups_are_refused_whole() -> None:
    with pytest.raises(InvalidFieldError, match="1025 groups"):
        read_put(b"\x0a\x00" * 1025)
