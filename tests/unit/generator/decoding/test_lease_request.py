from __future__ import annotations

import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_bytes
from services.generator.decoding.lease_request import to_request


def lease(*, sample_index=0, prompt=(1, 2), prefix=(), lease_id="l", **sampling):
    sampling.setdefault("max_new_tokens", 8)
    return broker_pb2.Lease(
        lease_id=lease_id,
        key=types_pb2.SampleKey(group_id="g", sample_index=sample_index),
        prompt=types_pb2.Prompt(token_ids=int32_bytes(prompt), sampling=types_pb2.SamplingParams(**sampling)),
        prefix_token_ids=int32_bytes(prefix),
    )


def test_sample_i_draws_with_the_groups_seed_plus_i():
    seeds = [to_request(lease(sample_index=i, seed=40), end_token_ids=()).sampling.seed for i in range(3)]
    assert seeds == [40, 41, 42]
    assert to_request(lease(), end_token_ids=()).sampling.seed is None


def test_a_seed_beyond_the_engines_range_wraps():
    assert to_request(lease(sample_index=1, seed=2**64 - 1), end_token_ids=()).sampling.seed == 0


def test_unset_sampling_means_temperature_one_without_truncation():
    sampling = to_request(lease(), end_token_ids=()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, None)


def test_temperature_zero_stays_zero():
    assert to_request(lease(temperature=0.0), end_token_ids=()).sampling.temperature == 0.0


def test_the_models_end_ids_join_the_prompts_stop_ids():
    request = to_request(lease(stop_token_ids=[9, 3]), end_token_ids=(2, 3))
    assert request.sampling.stop_token_ids == (2, 3, 9)


def test_prompt_and_prefix_are_taken_over():
    request = to_request(lease(prompt=(4, 5), prefix=(6,)), end_token_ids=())
    assert (request.prompt_token_ids, request.prefix_token_ids) == ((4, 5), (6,))
    assert request.request_id == "l"


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ()},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": 0},
        {"lease_id": ""},
        {"lease_id": "x" * 300},
    ],
)
def test_a_lease_no_engine_can_decode_is_refused(change):
    with pytest.raises(InvalidFieldError):
        to_request(lease(**change), end_token_ids=())


def test_token_bytes_of_a_wrong_length_are_refused():
    broken = lease()
    broken.prompt.token_ids = b"\x01\x02\x03"
    with pytest.raises(InvalidFieldError, match=r"prompt\.token_ids"):
        to_request(broken, end_token_ids=())
