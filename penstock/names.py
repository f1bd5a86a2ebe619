"""Names that come from the network or a configuration and end up in paths, keys and addresses: one rule for all."""

from __future__ import annotations

import re

from penstock.errors import InvalidFieldError

MAX_RUN_ID_CHARACTERS = 64
RUN_ID_RULE = f"1 to {MAX_RUN_ID_CHARACTERS} characters of [A-Za-z0-9._-], not of dots alone"

_RUN_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_RUN_ID_CHARACTERS}}}")


def is_run_id(text: str) -> bool:
    """Whether `text` can name a run: one plain component of a path, a Redis key and a URL."""
    # Dots alone are the folder itself or the one above it.
    return _RUN_ID.fullmatch(text) is not None and text.strip(".") != ""


def check_run_id(run_id: str) -> None:
    """Raises InvalidFieldError unless `run_id` can name a run."""
    if not is_run_id(run_id):
        raise InvalidFieldError(f"run_id: {run_id[:80]!r}; must be {RUN_ID_RULE}", field="run_id")
