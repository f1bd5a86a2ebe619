"""What headings of the documents can be linked by."""

from __future__ import annotations

import re
from pathlib import Path


def anchors_of(path: Path) -> set[str]:
    """The anchors of a Markdown page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
