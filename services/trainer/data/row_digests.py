"""Tells files of rows from others at the same path, between which an order cannot be continued."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import structlog

from penstock.config import ConfigError

ORDER_KEY = "order"
"""Of the prompts' order in `ResumeState.extra`."""
HELD_OUT_KEY = "held_out"
"""Of the digests of held-out files there."""
_SHOWN = 12
_log = structlog.get_logger()


def rows_digest(path: Path) -> str:
    """SHA-256 of a file, hex; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def difference(which: str, *, former: str, now: str) -> str:
    """Says that rows are others, and what to do."""
    return (
        f"{which} had other rows (sha256 {former[:_SHOWN]}..., now {now[:_SHOWN]}...); put the former file back to "
        "resume, or begin a new run with these rows"
    )


def check_rows(order: str, name: str, path: Path) -> None:
    """Refuse a file that is not the one that a checkpoint's order is of.

    Args:
        order: What a checkpoint has under ORDER_KEY; one that does not name the file has nothing to compare with.
        name: Of the file's source.
        path: It.

    Raises:
        ConfigError: It has other rows.
        OSError: It cannot be read.
    """
    try:
        former = json.loads(order)["sources"][name]["digest"]
    except (ValueError, KeyError, TypeError):
        # The trainer says what is wrong with it.
        return
    if former and (now := rows_digest(path)) != former:
        raise ConfigError(difference(str(path), former=former, now=now))


def warn_of_held_out(saved: str | None, digests: Mapping[str, str]) -> None:
    """Warn that accuracy is measured on other rows than before: such a run may go on, but not be compared with itself.

    Args:
        saved: What a checkpoint has under HELD_OUT_KEY.
        digests: SHA-256 of each held-out file now, by its source's name.
    """
    try:
        former = dict(json.loads(saved or "{}"))
    except (ValueError, TypeError):
        former = {}
    for name in sorted(former.keys() & digests.keys()):
        if former[name] != digests[name]:
            _log.warning(
                "held-out rows have changed: accuracy from here on is not comparable with that before",
                field=f"data.eval ({name})" if name else "data.eval",
                former=str(former[name])[:_SHOWN],
                now=digests[name][:_SHOWN],
            )
