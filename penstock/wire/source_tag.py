"""Says of which source a prompt is: an object in its metadata, so that rewards, recordings and exports have it, too."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

KEY = "penstock"
"""The key in a prompt's metadata; a column of that name in the data is replaced."""
MAX_NAME_CHARACTERS = 64
MAX_TAG_BYTES = 256
"""At most what a tag adds to metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTag:
    """Where a prompt comes from."""

    source: str
    """Name of the source; empty if the run has one without a name."""
    epoch: int = 0
    """Pass over the source, counted from 0."""
    row: int = 0
    """Row of its file, counted from 0."""


def tagged(metadata_json: str, tag: SourceTag) -> str:
    """The metadata, a JSON object or empty, with the tag in it."""
    metadata = json.loads(metadata_json) if metadata_json else {}
    return json.dumps(metadata | {KEY: asdict(tag)}, ensure_ascii=True)


def read_tag(metadata_json: str) -> SourceTag | None:
    """The tag in metadata that anyone may have sent; None if there is none that can be read."""
    if f'"{KEY}"' not in metadata_json:
        return None
    try:
        found = json.loads(metadata_json)[KEY]
        source, epoch, row = found["source"], found["epoch"], found["row"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_tag = isinstance(source, str) and len(source) <= MAX_NAME_CHARACTERS
    if not is_tag or type(epoch) is not int or type(row) is not int or min(epoch, row) < 0:
        return None
    return SourceTag(source=source, epoch=epoch, row=row)
