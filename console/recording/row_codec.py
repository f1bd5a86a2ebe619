"""Converts recorded samples to rows and back: a row maps columns to values, with numpy arrays.

The round trip is exact, log-probs bit for bit; times are kept to the microsecond. Rows are validated when read: a file
may come from any source. Columns are described in docs/recording.md.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from console.recording.recorded_sample import Recorded, RecordingError, Step
from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2
from penstock.wire.codec import (
    Float32,
    decode_versions,
    float32_array,
    float32_bytes,
    int32_array,
    int64_array,
    merge_versions,
)
from penstock.wire.timestamps import timestamp

Row = dict[str, Any]
"""Numpy arrays, numbers, texts, bytes, and lists and objects of them."""
_Value = TypeVar("_Value")

_STATUS_PREFIX, _FINISH_PREFIX = "SCORE_STATUS_", "FINISH_REASON_"
_TIMES = {"submit_s": "submit_time", "lease_s": "lease_time", "finish_s": "finish_time", "score_s": "score_time"}
_OPTIONAL_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_DTYPES: dict[str, Any] = {"int32": "<i4", "int64": "<i8", "float32": "<f4", "uint8": "u1"}
STEP_COLUMNS = ("run_id", "policy_version", "history")
"""Columns that identify a row's step."""
POSITION_COLUMNS = ("group_id", "sample_index")
"""Columns that identify a sample within its step."""


def to_row(sample: Recorded) -> Row:
    """The row of a sample."""
    prompt, trajectory = sample.prompt, sample.trajectory
    # The broker stores a version run for each received chunk of tokens.
    versions = merge_versions(trajectory.policy_versions)
    return {
        "run_id": sample.run_id,
        "policy_version": sample.policy_version,
        "history": sample.history,
        "group_id": prompt.group_id,
        "sample_index": trajectory.key.sample_index,
        "attempt": trajectory.key.attempt,
        "group_size": prompt.group_size,
        "prompt": prompt.text,
        "messages": [{"role": turn.role, "content": turn.content} for turn in prompt.messages],
        "prompt_token_ids": int32_array(prompt.token_ids, "prompt.token_ids"),
        "sampling": _sampling_row(prompt.sampling),
        "answer": prompt.answer,
        "metadata_json": prompt.metadata_json,
        "prompt_min_policy_version": _given(prompt, "min_policy_version"),
        "completion": trajectory.text,
        "token_ids": int32_array(trajectory.token_ids, "token_ids"),
        "logprobs": float32_array(trajectory.behavior_logprobs, "behavior_logprobs"),
        "versions": int64_array(versions.versions, "policy_versions.versions"),
        "version_lengths": int32_array(versions.lengths, "policy_versions.lengths"),
        "loss_mask": np.frombuffer(trajectory.loss_mask, np.uint8),
        "advantages": float32_array(trajectory.advantages, "advantages"),
        **({"routes": trajectory.routes} if trajectory.routes else {}),
        "finish_reason": types_pb2.FinishReason.Name(trajectory.finish_reason).removeprefix(_FINISH_PREFIX).lower(),
        "score": _score_row(trajectory.score),
        "previous_score": None if sample.previous_score is None else _score_row(sample.previous_score),
        "num_leases": trajectory.num_leases,
        "min_policy_version": trajectory.min_policy_version,
        "max_policy_version": trajectory.max_policy_version,
        "generator_id": trajectory.generator_id,
        **{
            column: None if (time := _given(trajectory, field)) is None else time.ToMicroseconds() / 1e6
            for column, field in _TIMES.items()
        },
    }


def from_row(row: Mapping[str, Any], *, where: str) -> Recorded:
    """The sample of a row; unknown columns are ignored. Raises RecordingError that begins with `where`."""
    return _read(row, where, _Reading.sample)


def step_of(row: Mapping[str, Any], *, where: str) -> Step:
    """The step of a row; needs only its STEP_COLUMNS. Raises RecordingError that begins with `where`."""
    return _read(row, where, _Reading.step)


def position_of(row: Mapping[str, Any], *, where: str) -> tuple[str, int]:
    """Group id and sample index of a row; needs only its POSITION_COLUMNS. Raises RecordingError."""
    return _read(row, where, lambda _reading: (str(row["group_id"]), int(row["sample_index"])))


def _read(row: Mapping[str, Any], where: str, what: Callable[[_Reading], _Value]) -> _Value:
    try:
        return what(_Reading(row))
    except (InvalidFieldError, KeyError, TypeError, ValueError, OverflowError) as error:
        problem = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
        raise RecordingError(f"{where}: {problem}") from error


def shortest_decimals(values: Float32) -> list[float]:
    """Numbers with short decimal forms that read back to the same float32 [n], bit for bit."""
    shortest = values.astype("U").astype(np.float64)
    # Read back through float64, a shortest form may, very rarely, round to a neighbour.
    numbers: list[float] = np.where(shortest.astype(np.float32) == values, shortest, values.astype(np.float64)).tolist()
    return numbers


def _sampling_row(sampling: types_pb2.SamplingParams) -> Row:
    row: Row = {name: _given(sampling, name) for name in _OPTIONAL_SAMPLING}
    for name in ("temperature", "top_p"):
        if row[name] is not None:
            row[name] = shortest_decimals(np.asarray([row[name]], np.float32))[0]
    return row | {"max_new_tokens": sampling.max_new_tokens, "stop_token_ids": list(sampling.stop_token_ids)}


def _score_row(score: types_pb2.Score) -> Row:
    return {
        "status": types_pb2.ScoreStatus.Name(score.status).removeprefix(_STATUS_PREFIX).lower(),
        "value": _given(score, "value"),
        "components": dict(sorted(score.components.items())),
        "details": dict(sorted(score.details.items())),
        "message": score.message,
        "model": score.model,
        "latency_s": score.latency.ToNanoseconds() / 1e9 if score.HasField("latency") else None,
        **({"turn_values": float32_array(score.turn_values, "turn_values").tolist()} if score.turn_values else {}),
    }


class _Reading:
    """A row being decoded to a sample; every method raises one of the errors that `from_row` reports."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row

    def step(self) -> Step:
        return self._text("run_id"), self._number("policy_version", least=1), self._number("history")

    def sample(self) -> Recorded:
        has_previous = self._row.get("previous_score") is not None
        run_id, policy_version, history = self.step()
        return Recorded(
            run_id=run_id,
            policy_version=policy_version,
            history=history,
            prompt=self._prompt(),
            trajectory=self._trajectory(),
            previous_score=_score(self._mapping("previous_score")) if has_previous else None,
        )

    def _prompt(self) -> types_pb2.Prompt:
        least = self._row.get("prompt_min_policy_version")
        turns = self._row["messages"] or ()
        return types_pb2.Prompt(
            group_id=self._text("group_id"),
            token_ids=self._array("prompt_token_ids", "int32", is_required=True),
            group_size=self._number("group_size", least=1),
            sampling=_sampling(self._mapping("sampling")),
            text=self._text("prompt"),
            messages=[types_pb2.ChatMessage(role=turn["role"], content=turn["content"]) for turn in turns],
            answer=self._text("answer"),
            metadata_json=self._text("metadata_json"),
            purpose=types_pb2.PURPOSE_TRAIN,
            min_policy_version=None if least is None else int(least),
        )

    def _trajectory(self) -> types_pb2.Trajectory:
        trajectory = types_pb2.Trajectory(
            key=types_pb2.SampleKey(
                group_id=self._text("group_id"),
                sample_index=self._number("sample_index"),
                attempt=self._number("attempt"),
            ),
            num_leases=self._number("num_leases"),
            token_ids=self._array("token_ids", "int32"),
            behavior_logprobs=self._array("logprobs", "float32"),
            policy_versions=types_pb2.VersionRuns(
                versions=self._array("versions", "int64"), lengths=self._array("version_lengths", "int32")
            ),
            loss_mask=self._array("loss_mask", "uint8"),
            finish_reason=types_pb2.FinishReason.Value(_FINISH_PREFIX + self._text("finish_reason").upper()),
            score=_score(self._mapping("score")),
            advantages=self._array("advantages", "float32"),
            routes=self._bytes("routes"),
            min_policy_version=self._number("min_policy_version"),
            max_policy_version=self._number("max_policy_version"),
            generator_id=self._text("generator_id"),
            text=self._text("completion"),
        )
        for column, field in _TIMES.items():
            if (seconds := self._row.get(column)) is not None:
                getattr(trajectory, field).CopyFrom(timestamp(seconds))
        _check_lengths(trajectory)
        return trajectory

    def _text(self, column: str) -> str:
        value = self._row[column]
        if not isinstance(value, str):
            raise ValueError(f"{column}: expected text, found {value!r:.60}")
        return value

    def _mapping(self, column: str) -> Mapping[str, Any]:
        value = self._row[column]
        if not isinstance(value, Mapping):
            raise ValueError(f"{column}: expected an object, found {value!r:.60}")
        return value

    def _number(self, column: str, *, least: int = 0) -> int:
        value = self._row[column]
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{column}: expected a whole number of at least {least}, found {value!r:.60}")
        return value

    def _bytes(self, column: str) -> bytes:
        """Bytes, as base64 in JSON; empty without the column, which older recordings do not have."""
        value = self._row.get(column)
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
        if value is not None and not isinstance(value, bytes):
            raise ValueError(f"{column}: expected bytes, found {value!r:.60}")
        return value or b""

    def _array(self, column: str, kind: str, *, is_required: bool = False) -> bytes:
        array: npt.NDArray[Any] = np.asarray(self._row[column])
        kinds = "iuf" if kind == "float32" else "iu"
        if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
            raise ValueError(f"{column}: expected a list of {kind}, found {self._row[column]!r:.60}")
        if is_required and not array.size:
            raise ValueError(f"{column}: must not be empty")
        if kinds == "iu" and array.size:
            bounds = np.iinfo(_DTYPES[kind])
            if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
                raise ValueError(f"{column}: a number does not fit {kind}")
        return bytes(array.astype(_DTYPES[kind]).tobytes())


def _sampling(row: Mapping[str, Any]) -> types_pb2.SamplingParams:
    given: dict[str, Any] = {name: row.get(name) for name in _OPTIONAL_SAMPLING if row.get(name) is not None}
    return types_pb2.SamplingParams(
        **given, max_new_tokens=row["max_new_tokens"], stop_token_ids=row.get("stop_token_ids") or ()
    )


def _score(row: Mapping[str, Any]) -> types_pb2.Score:
    latency_s = row.get("latency_s")
    score = types_pb2.Score(
        status=types_pb2.ScoreStatus.Value(_STATUS_PREFIX + row["status"].upper()),
        value=row.get("value"),
        components=dict(row.get("components") or ()),
        details=dict(row.get("details") or ()),
        message=row.get("message") or "",
        model=row.get("model") or "",
        turn_values=float32_bytes(row.get("turn_values") or ()),
    )
    if latency_s is not None:
        score.latency.FromNanoseconds(round(latency_s * 1e9))
    return score


def _given(message: Any, field: str) -> Any:
    """The field's value, or None if it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def _check_lengths(trajectory: types_pb2.Trajectory) -> None:
    num_tokens = len(trajectory.token_ids) // 4
    decode_versions(trajectory.policy_versions, num_tokens=num_tokens, field="versions")
    arrays: Sequence[tuple[str, int, bool]] = (
        ("logprobs", len(trajectory.behavior_logprobs) // 4, False),
        ("loss_mask", len(trajectory.loss_mask), True),
        ("advantages", len(trajectory.advantages) // 4, True),
    )
    for column, length, may_be_empty in arrays:
        if length != num_tokens and not (may_be_empty and length == 0):
            raise ValueError(f"{column}: {length} numbers for {num_tokens} token_ids")
