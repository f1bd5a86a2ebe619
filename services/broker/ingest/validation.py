"""Validates client messages: every field is bounded, every refusal names field and value. Pure.

Each check raises InvalidFieldError and returns nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from penstock.errors import InvalidFieldError, PenstockError, require
from penstock.names import check_run_id
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_array
from penstock.wire.routes import RoutingShape
from penstock.wire.sampling_rules import check_trainable
from services.broker.rules.limits import MAX_GROUP_SIZE, MAX_ID_BYTES, Limits
from services.broker.rules.sample_policy import Policy

MAX_PROMPTS = 1_024
MAX_CHUNKS = 4_096
MAX_RESULTS = 1_024
MAX_ACTIVE_LEASES = 65_536
MAX_STEP_S = 60.0
"""A longer decode step means that the statement is wrong."""
MIN_STEP_S = 1e-12
"""The same of a shorter one: not even an emulated GPU on a fast clock has it."""
MIN_PREFILL_TOKENS_PER_SECOND = 1e-3
MAX_GROUP_IDS = 65_536
MAX_STEP_RECORDS = 1_024
MAX_BUSY_SPANS_PER_BEAT = 64
MAX_REASONS = 64
MAX_BATCH_BYTES = 1024 * 1024
MAX_TOKENS_REQUEST_BYTES = 12 * 1024 * 1024
"""Chunks of one request: the text of one long completion, and the others that a generator sends with it."""
MAX_METADATA_BYTES = 64 * 1024
MAX_TEXT_CHARACTERS = 1024
MAX_ID_CHARACTERS = 128
MAX_STOP_TOKENS = 64
_ROLES = frozenset(("system", "user", "assistant", "tool"))
_ENDPOINT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*):[0-9]{1,5}")
_REASON = re.compile(r"[a-z0-9_]{1,64}")


def item_error(index: int, error: PenstockError) -> types_pb2.ItemError:
    """The refusal of one item of a request."""
    return types_pb2.ItemError(index=index, code=error.code, reason=error.reason, message=str(error))


def check_id(field: str, value: str) -> None:
    """1 to 128 printable characters, at most 240 bytes."""
    is_good = 1 <= len(value) <= MAX_ID_CHARACTERS and value.isprintable()
    is_good = is_good and (value.isascii() or len(value.encode()) <= MAX_ID_BYTES)
    require(is_good, field, value[:80], f"1 to {MAX_ID_CHARACTERS} printable characters of {MAX_ID_BYTES} bytes")


def check_ids(field: str, values: Sequence[str]) -> None:
    """`check_id` of each."""
    whole, lengths = "".join(values), list(map(len, values))
    if not (whole.isascii() and whole.isprintable() and min(lengths) >= 1 and max(lengths) <= MAX_ID_CHARACTERS):
        for value in values:
            check_id(field, value)


def check_reason(reason: str, *, field: str = "reason") -> None:
    """1 to 64 characters of [a-z0-9_]."""
    require(_REASON.fullmatch(reason) is not None, field, reason[:80], "1 to 64 characters of [a-z0-9_]")


def check_count(field: str, count: int, most: int) -> None:
    """A repeated field of at most `most` items."""
    require(count <= most, field, count, f"at most {most} items")


def check_lease_ids(field: str, lease_ids: Sequence[str]) -> None:
    """At most 65,536 ids of at most 128 characters."""
    check_count(field, len(lease_ids), MAX_ACTIVE_LEASES)
    longest = max(map(len, lease_ids), default=0)
    require(
        longest <= MAX_ID_CHARACTERS, field, f"{longest} characters", f"at most {MAX_ID_CHARACTERS} characters each"
    )


def check_bytes(field: str, size_bytes: int, *, most: int = MAX_BATCH_BYTES) -> None:
    """A batch of at most 1 MiB, or this many bytes."""
    require(size_bytes <= most, field, f"{size_bytes} bytes", f"at most {most} bytes")


def check_timestamp(field: str, stamp: Timestamp) -> None:
    """A time between the years 1 and 9999."""
    try:
        stamp.ToMicroseconds()
    except ValueError as error:
        raise InvalidFieldError(f"{field}: {error}", field=field) from error


def check_text(field: str, text: str) -> None:
    """Readable text, at most 1,024 characters."""
    limit = MAX_TEXT_CHARACTERS
    require(len(text) <= limit, field, f"{len(text)} characters", f"at most {limit} characters")


def check_prompt(prompt: types_pb2.Prompt, limits: Limits) -> None:
    """A prompt that the run can take."""
    check_id("group_id", prompt.group_id)
    token_ids = int32_array(prompt.token_ids, "token_ids")
    require(token_ids.size >= 1, "token_ids", "empty", "at least one token")
    require(int(token_ids.min()) >= 0, "token_ids", int(token_ids.min()), "no negative token ids")
    is_training = prompt.purpose == types_pb2.PURPOSE_TRAIN
    require(
        is_training or prompt.purpose == types_pb2.PURPOSE_EVALUATE,
        "purpose",
        prompt.purpose,
        "TRAIN or EVALUATE",
    )
    require(1 <= prompt.group_size <= MAX_GROUP_SIZE, "group_size", prompt.group_size, f"1 to {MAX_GROUP_SIZE}")
    require(
        not is_training or prompt.group_size <= limits.group_size,
        "group_size",
        prompt.group_size,
        f"at most the run's group size, {limits.group_size}",
    )
    require(
        not prompt.HasField("min_policy_version") or prompt.min_policy_version >= 0,
        "min_policy_version",
        prompt.min_policy_version,
        "at least 0",
    )
    _check_sampling(prompt.sampling, limits)
    if is_training:
        check_trainable(prompt.sampling)
        _check_routed(prompt, limits)
    for message in prompt.messages:
        require(message.role in _ROLES, "messages.role", message.role[:80], "system, user, assistant or tool")
    _check_metadata(prompt.metadata_json)


def _check_routed(prompt: types_pb2.Prompt, limits: Limits) -> None:
    """Its rows of routes must fit a message, and with those of all samples a group."""
    if limits.routing is None:
        return
    rows = f"tokens in a run whose routes take {limits.routing.row_bytes} bytes each"
    num_tokens, group_size = len(prompt.token_ids) // 4, prompt.group_size
    most = limits.routing.max_group_tokens // group_size - prompt.sampling.max_new_tokens
    most = min(most, limits.routing.max_prompt_tokens)
    require(num_tokens <= most, "token_ids", num_tokens, f"at most {most} {rows}")


def _check_sampling(sampling: types_pb2.SamplingParams, limits: Limits) -> None:
    most = limits.max_completion_tokens
    require(
        1 <= sampling.max_new_tokens <= most,
        "sampling.max_new_tokens",
        sampling.max_new_tokens,
        f"1 to the run's {most}",
    )
    temperature, top_p = sampling.temperature, sampling.top_p
    require(
        math.isfinite(temperature) and temperature >= 0,
        "sampling.temperature",
        temperature,
        "finite and at least 0",
    )
    require(not sampling.HasField("top_p") or 0 < top_p <= 1, "sampling.top_p", top_p, "in (0, 1]")
    require(not sampling.HasField("top_k") or sampling.top_k >= 1, "sampling.top_k", sampling.top_k, "at least 1")
    check_count("sampling.stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKENS)


def _check_metadata(metadata_json: str) -> None:
    if not metadata_json:
        return
    size_bytes = len(metadata_json.encode())
    require(
        size_bytes <= MAX_METADATA_BYTES,
        "metadata_json",
        f"{size_bytes} bytes",
        f"at most {MAX_METADATA_BYTES} bytes",
    )
    try:
        value = json.loads(metadata_json)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(f"metadata_json: not valid JSON: {error}", field="metadata_json") from error
    require(isinstance(value, dict), "metadata_json", type(value).__name__, "one JSON object")


def check_hello(hello: broker_pb2.GeneratorHello) -> None:
    """A generator's first frame."""
    check_run_id(hello.run_id)
    check_id("hello.generator_id", hello.generator_id)
    predecessor = hello.replaces_generator_id
    if predecessor:
        check_id("hello.replaces_generator_id", predecessor)
        is_another = predecessor != hello.generator_id
        require(is_another, "hello.replaces_generator_id", predecessor, "another process's, which has ended; or empty")
    require(hello.max_context_tokens >= 2, "hello.max_context_tokens", hello.max_context_tokens, "at least 2")
    # For display only and never called, so it need not be the generator's own.
    is_address = not hello.endpoint or _ENDPOINT.fullmatch(hello.endpoint) is not None
    require(is_address, "hello.endpoint", hello.endpoint[:80], "host:port, or empty")
    for field, value in (("site", hello.site), ("engine", hello.engine), ("endpoint", hello.endpoint)):
        require(
            len(value) <= MAX_ID_CHARACTERS,
            f"hello.{field}",
            value[:80],
            f"at most {MAX_ID_CHARACTERS} characters",
        )
    _check_profile(hello.profile)


def check_routing(hello: broker_pb2.GeneratorHello, limits: Limits) -> None:
    """A generator records the routes that its run asks for, and none otherwise."""
    asked, recorded = limits.routing, None
    if hello.HasField("routing"):
        recorded = RoutingShape.from_proto(hello.routing, "hello.routing")
    engine = hello.engine[:MAX_ID_CHARACTERS]
    if asked is None:
        require(recorded is None, "hello.routing", recorded, "unset in a run without algorithm.routing_replay")
    elif recorded is None:
        raise InvalidFieldError(
            f"hello.routing: unset, but the run replays routes (algorithm.routing_replay), and engine {engine!r} "
            "records none: set records_routes in the generator's configuration, with an engine that can",
            field="hello.routing",
        )
    else:
        require(recorded == asked, "hello.routing", recorded, f"that of the trainer's model, {asked}")


def check_environment(hello: broker_pb2.GeneratorHello, policy: Policy) -> None:
    """A generator talks with the run's environment, if that has one: single turns would be scored as whole sessions."""
    if policy.has_environment and not hello.has_environment:
        raise InvalidFieldError(
            "hello.has_environment: unset, but the run has an environment: name it in the generator's configuration as "
            "environment.target",
            field="hello.has_environment",
        )
    is_good = policy.has_environment or not hello.has_environment
    require(is_good, "hello.has_environment", True, "unset in a run without an environment")


def _check_profile(profile: broker_pb2.GeneratorProfile) -> None:
    for field in ("step_base_s", "step_per_sample_s", "step_per_kv_token_s"):
        value: float = getattr(profile, field)
        require(0 <= value <= MAX_STEP_S, f"hello.profile.{field}", value, f"0 (unknown) to {MAX_STEP_S} s")
    step_s = profile.step_base_s + profile.step_per_sample_s
    require(
        step_s == 0 or step_s >= MIN_STEP_S,
        "hello.profile.step_base_s + step_per_sample_s",
        step_s,
        f"0 (unknown) or at least {MIN_STEP_S} s",
    )
    rate, least = profile.prefill_tokens_per_second, MIN_PREFILL_TOKENS_PER_SECOND
    require(
        rate == 0 or least <= rate < math.inf,
        "hello.profile.prefill_tokens_per_second",
        rate,
        f"0 (unknown), or finite and at least {least}",
    )
    most = profile.max_concurrent_samples
    require(most <= MAX_ACTIVE_LEASES, "hello.profile.max_concurrent_samples", most, f"at most {MAX_ACTIVE_LEASES}")


def check_beat(beat: broker_pb2.GeneratorBeat, lease_ids: Sequence[str]) -> None:
    """A generator's heartbeat, with its `active_lease_ids` as they were read from it."""
    require(beat.policy_version >= 0, "beat.policy_version", beat.policy_version, "at least 0")
    if beat.instance_id:
        check_id("beat.instance_id", beat.instance_id)
    check_count("beat.warning", len(beat.warning), MAX_TEXT_CHARACTERS)
    check_count("beat.refused_chunks", len(beat.refused_chunks), MAX_REASONS)
    for reason in beat.refused_chunks:
        check_id("beat.refused_chunks", reason)
    check_lease_ids("beat.active_lease_ids", lease_ids)
    check_count("beat.busy_spans", len(beat.busy_spans), MAX_BUSY_SPANS_PER_BEAT)
    for span in beat.busy_spans:
        check_timestamp("beat.busy_spans.start_time", span.start_time)
        check_timestamp("beat.busy_spans.end_time", span.end_time)
    check_timestamp("beat.now_time", beat.now_time)
    usage, speed = beat.kv_cache_usage, beat.tokens_per_second
    require(math.isfinite(usage) and usage >= 0, "beat.kv_cache_usage", usage, "finite and at least 0")
    require(math.isfinite(speed) and speed >= 0, "beat.tokens_per_second", speed, "finite and at least 0")
