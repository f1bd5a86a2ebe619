"""Turns a lease into the engine's request: checked field by field, since it came over the network."""

from __future__ import annotations

import math

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_array
from services.generator.engine.engine import MAX_REQUEST_ID_CHARACTERS, GenerateRequest, SamplingSettings

_SEED_SPAN = 2**63


def to_request(
    lease: broker_pb2.Lease, *, end_token_ids: tuple[int, ...], records_routes: bool = False
) -> GenerateRequest:
    """The engine's request for a lease.

    Args:
        lease: The work; sample i of a group draws with the group's seed + i.
        end_token_ids: The model's own end-of-sequence ids; they end a sample beside the prompt's.
        records_routes: Whether what is trained on comes with routes.

    Raises:
        InvalidFieldError: The lease cannot be decoded by any engine.
    """
    if not 0 < len(lease.lease_id) <= MAX_REQUEST_ID_CHARACTERS:
        raise InvalidFieldError("lease id is empty or too long", field="lease_id")
    prompt_token_ids = tuple(int32_array(lease.prompt.token_ids, "prompt.token_ids").tolist())
    prefix_token_ids = tuple(int32_array(lease.prefix_token_ids, "prefix_token_ids").tolist())
    try:
        return GenerateRequest(
            request_id=lease.lease_id,
            prompt_token_ids=prompt_token_ids,
            prefix_token_ids=prefix_token_ids,
            sampling=_settings(lease.prompt.sampling, lease.key.sample_index, end_token_ids),
            has_routes=records_routes and lease.prompt.purpose == types_pb2.PURPOSE_TRAIN,
        )
    except ValueError as error:
        raise InvalidFieldError(f"sample {lease.key.group_id}/{lease.key.sample_index}: {error}") from error


def _settings(params: types_pb2.SamplingParams, sample_index: int, end_token_ids: tuple[int, ...]) -> SamplingSettings:
    temperature = params.temperature if params.HasField("temperature") else 1.0
    top_p = params.top_p if params.HasField("top_p") else 1.0
    if not (math.isfinite(temperature) and math.isfinite(top_p)):
        raise ValueError("temperature and top_p must be finite")
    return SamplingSettings(
        temperature=temperature,
        top_p=top_p,
        top_k=params.top_k if params.HasField("top_k") else None,
        max_new_tokens=params.max_new_tokens,
        seed=(params.seed + sample_index) % _SEED_SPAN if params.HasField("seed") else None,
        stop_token_ids=tuple(sorted({*params.stop_token_ids, *end_token_ids})),
    )
