"""Opens a recording for questions: an index of where its groups are, made as it grows, and the rows of single groups.

Never holds more than a row of it in memory, or a batch of them if it is parquet. Building the index is cut into pieces,
so that an answer about a recording of gigabytes does not wait for all of it.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from console.page.files.group_index import GroupHead, GroupIndex, Place
from console.page.files.growing_file import GrowingFile
from console.recording.jsonl import MAX_LINE_BYTES
from console.recording.parts import part_path
from console.recording.row_codec import Row

BUDGET_S = 0.5
"""Time that one answer spends on the index; the next one continues."""
_BATCH_ROWS = 64
_TEXT = rb'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(rb'\{"run_id":%b,"policy_version":(\d{1,18}),"history":(\d{1,9}),"group_id":(%b),' % (_TEXT, _TEXT))
_PROMPT, _AFTER_PROMPT = b',"prompt":', b',"prompt_token_ids":'
_UNREADABLE = (OSError, ValueError, RecursionError)


class IndexedRecording(ABC):
    """A recording with an index; made by `open_recording`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = GroupIndex()
        self.generation = 0
        """Raised when the recording was replaced by another one."""

    @abstractmethod
    def advance(self, budget_s: float = BUDGET_S) -> None:
        """Index what was written since, for about so long."""

    @property
    @abstractmethod
    def indexed_share(self) -> float:
        """How much of the recording is indexed, 0 to 1."""

    @abstractmethod
    def rows(self, numbers: Sequence[int]) -> Iterator[Row]:
        """The readable rows of groups of the index, in order; damaged ones are left out."""


def open_recording(path: Path) -> IndexedRecording:
    """The recording whose first file is `path`; it need not exist yet."""
    return ParquetRecording(path) if path.suffix == ".parquet" else JsonLinesRecording(path)


class JsonLinesRecording(IndexedRecording):
    """JSON lines, one file or several."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._first: tuple[int, int] | None = None
        """Of the first file: inode and size."""
        self._is_behind = False
        """Whether the last reading ended before the files did; a line that is not whole is no reason to read on."""
        self._begin(1)

    def _begin(self, part: int) -> None:
        self._part = part
        self._file = GrowingFile(part_path(self.path, part), max_line_bytes=MAX_LINE_BYTES)

    def advance(self, budget_s: float = BUDGET_S) -> None:
        """Index new lines of the file, then those of the next one."""
        until_s = time.monotonic() + budget_s
        self._is_behind = True
        if self._is_replaced():
            self._start_again()
        while time.monotonic() < until_s:
            if self._file.has_changed():
                for begin, line in self._file.lines():
                    if self._is_another():
                        break
                    if (head := _head(line)) is not None:
                        self.index.add(head, Place(part=self._part, begin=begin, end=begin + len(line)))
                    if time.monotonic() > until_s:
                        return
                if self._is_another():
                    self._start_again()
                    continue
            if not part_path(self.path, self._part + 1).is_file():
                self._is_behind = False
                return
            self._begin(self._part + 1)

    @property
    def indexed_share(self) -> float:
        """Of all files, by their bytes."""
        if not self._is_behind:
            return 1.0
        done, total = _sizes(self.path, self._part - 1) + self._file.offset, _sizes(self.path)
        return min(0.9999, done / total) if total else 1.0

    def rows(self, numbers: Sequence[int]) -> Iterator[Row]:
        """Read the lines of each group."""
        for number in numbers:
            place = self.index.place(number)
            try:
                with part_path(self.path, place.part).open("rb") as file:
                    file.seek(place.begin)
                    while file.tell() < place.end and (line := file.readline(MAX_LINE_BYTES + 1)):
                        if (row := _parsed(line)) is not None:
                            yield row
            except OSError:
                continue

    def _is_another(self) -> bool:
        return self._file.generation > 0

    def _is_replaced(self) -> bool:
        """Whether another recording has begun, of which the file being read may be no part."""
        before, self._first = self._first, _identity(self.path)
        is_other_file = before is not None and self._first is not None and before[0] != self._first[0]
        return is_other_file or (self._part > 1 and not self._file.path.exists())

    def _start_again(self) -> None:
        self.index.clear()
        self.generation += 1
        self._begin(1)


class ParquetRecording(IndexedRecording):
    """Parquet, one file or several; each is complete once it is there."""

    _COLUMNS = ("policy_version", "history", "group_id", "prompt", "messages")

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._next = (1, 0)
        self._identity: tuple[int, int] | None = None

    def advance(self, budget_s: float = BUDGET_S) -> None:
        """Index row groups that were not read yet."""
        until_s = time.monotonic() + budget_s
        if (identity := _identity(self.path)) != self._identity:
            self.generation += self._identity is not None
            self.index.clear()
            self._identity, self._next = identity, (1, 0)
        while time.monotonic() < until_s and self._index_row_group():
            pass

    def _index_row_group(self) -> bool:
        part, row_group = self._next
        path = part_path(self.path, part)
        if not path.is_file():
            return False
        try:
            for row, begin in _parquet_rows(path, row_group, self._COLUMNS):
                if (head := _head_of(row)) is not None:
                    self.index.add(head, Place(part=part, row_group=row_group, begin=begin, end=begin + 1))
        except (IndexError, *_UNREADABLE):
            self._next = (part + 1, 0)
            return True
        self._next = (part, row_group + 1)
        return True

    @property
    def indexed_share(self) -> float:
        """1 once no file is left."""
        return 0.0 if part_path(self.path, self._next[0]).is_file() else 1.0

    def rows(self, numbers: Sequence[int]) -> Iterator[Row]:
        """Read each row group once."""
        wanted: dict[tuple[int, int], list[Place]] = {}
        for place in map(self.index.place, numbers):
            wanted.setdefault((place.part, place.row_group), []).append(place)
        for (part, row_group), places in wanted.items():
            try:
                for row, number in _parquet_rows(part_path(self.path, part), row_group, None):
                    if any(place.begin <= number < place.end for place in places):
                        yield row
            except (IndexError, *_UNREADABLE):
                continue


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size


def _sizes(path: Path, last: int | None = None) -> int:
    """Bytes of a recording's first parts, or of all."""
    total, part = 0, 1
    while (last is None or part <= last) and (found := _identity(part_path(path, part))) is not None:
        total, part = total + found[1], part + 1
    return total


def _parquet_rows(path: Path, row_group: int, columns: Sequence[str] | None) -> Iterator[tuple[Row, int]]:
    """Rows of a row group with their numbers. Raises IndexError if there is no such group."""
    # pyarrow takes a quarter of a second and 50 MiB to import; JSON lines do not need it.
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        if row_group >= file.num_row_groups:
            raise IndexError
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[row_group], columns=columns):
            for row in batch.to_pylist():
                yield row, number
                number += 1


def _head(line: bytes) -> GroupHead | None:
    """The head of a row as it is written, without parsing all of the row if it is in the usual order."""
    found = _HEAD.match(line)
    begin = line.find(_PROMPT, found.end() - 1) if found is not None else -1
    end = line.find(_AFTER_PROMPT, begin) if begin >= 0 else -1
    if found is None or end < 0:
        row = _parsed(line)
        return None if row is None else _head_of(row)
    prompt = line[begin + len(_PROMPT) : end]
    return GroupHead(policy_version=int(found[1]), history=int(found[2]), group_id=_text_of(found[3]), prompt=prompt)


def _text_of(quoted: bytes) -> bytes:
    if b"\\" not in quoted:
        return quoted[1:-1]
    try:
        return str(json.loads(quoted)).encode(errors="replace")
    except ValueError:
        return quoted


def _head_of(row: Row) -> GroupHead | None:
    version, history = row.get("policy_version"), row.get("history")
    if not isinstance(version, int) or not isinstance(history, int) or not 0 <= max(version, history) < 2**62:
        return None
    prompt: list[Any] = [row.get("prompt"), row.get("messages") or []]
    text = json.dumps(prompt[0], ensure_ascii=False) + ',"messages":'
    text += json.dumps(prompt[1], ensure_ascii=False, separators=(",", ":"))
    return GroupHead(
        policy_version=version,
        history=history,
        group_id=str(row.get("group_id")).encode(errors="replace"),
        prompt=text.encode(errors="replace"),
    )


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
