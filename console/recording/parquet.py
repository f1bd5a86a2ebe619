"""Stores recordings as parquet: list columns, a row group every few steps; a file is complete once it is closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from console.recording.recorded_sample import RecordingError
from console.recording.row_codec import Row

MAX_GROUP_BYTES = 16 * 1024 * 1024
"""Payload buffered before a row group is written."""
READ_BATCH_ROWS = 64
COMPRESSION = "zstd"

_SCORE = pa.struct(
    [
        ("status", pa.string()),
        ("value", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("details", pa.map_(pa.string(), pa.string())),
        ("message", pa.string()),
        ("model", pa.string()),
        ("latency_s", pa.float64()),
        ("turn_values", pa.list_(pa.float32())),
    ]
)
_SAMPLING = pa.struct(
    [
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.uint32()),
        ("max_new_tokens", pa.uint32()),
        ("seed", pa.uint64()),
        ("stop_token_ids", pa.list_(pa.uint32())),
    ]
)
SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("policy_version", pa.int64()),
        ("history", pa.uint32()),
        ("group_id", pa.string()),
        ("sample_index", pa.uint32()),
        ("attempt", pa.uint32()),
        ("group_size", pa.uint32()),
        ("prompt", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("sampling", _SAMPLING),
        ("answer", pa.string()),
        ("metadata_json", pa.string()),
        ("prompt_min_policy_version", pa.int64()),
        ("completion", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int64())),
        ("version_lengths", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("advantages", pa.list_(pa.float32())),
        ("routes", pa.binary()),
        ("finish_reason", pa.string()),
        ("score", _SCORE),
        ("previous_score", _SCORE),
        ("num_leases", pa.uint32()),
        ("min_policy_version", pa.int64()),
        ("max_policy_version", pa.int64()),
        ("generator_id", pa.string()),
        ("submit_s", pa.float64()),
        ("lease_s", pa.float64()),
        ("finish_s", pa.float64()),
        ("score_s", pa.float64()),
    ]
)


class ParquetWriter:
    """Buffers rows and writes a row group whenever there are enough of them. The file is readable once closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = pq.ParquetWriter(path, SCHEMA, compression=COMPRESSION)
        self._rows: list[Row] = []
        self._num_bytes = 0

    def write(self, rows: Sequence[Row]) -> None:
        """Add rows."""
        for row in rows:
            self._rows.append(row)
            self._num_bytes += sum(map(_size_bytes, row.values())) + 1024
            if self._num_bytes >= MAX_GROUP_BYTES:
                self._write_group()

    @property
    def size_bytes(self) -> int:
        """Size of the file, including buffered rows."""
        return self._path.stat().st_size + self._num_bytes

    def flush(self) -> None:
        """Do nothing: a parquet file is complete only when it is closed."""

    def close(self) -> None:
        """Write the remaining rows and the footer."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._rows:
            columns = [_column(field, [row.get(field.name) for row in self._rows]) for field in SCHEMA]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
            self._rows, self._num_bytes = [], 0


def _size_bytes(value: object) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else len(value) if isinstance(value, bytes) else 0


def _column(field: Any, values: list[Any]) -> Any:
    if field.type == _SCORE:
        values = [None if value is None else _with_pairs(value) for value in values]
    return pa.array(values, type=field.type)


def _with_pairs(score: Row) -> Row:
    """Pyarrow accepts a mapping as a list of pairs."""
    return {**score, **{name: list(dict(score[name]).items()) for name in ("components", "details")}}


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
    """Every row with its position, with all columns or only some. Raises RecordingError."""
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=READ_BATCH_ROWS, columns=columns):
                for index in range(batch.num_rows):
                    number += 1
                    yield (
                        f"{path}, row {number}",
                        {name: _value(batch.column(name)[index]) for name in batch.schema.names},
                    )
    except (pa.ArrowException, OSError) as error:
        raise RecordingError(f"{path}: not a readable parquet file: {error}") from error


def _value(scalar: Any) -> Any:
    """A scalar as a row value: lists of numbers as arrays, the rest as plain Python."""
    if not scalar.is_valid:
        return None
    if pa.types.is_list(scalar.type) and not pa.types.is_nested(scalar.type.value_type):
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()
